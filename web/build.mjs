// Builds web/src into the static files that the Python package ships.
//
//   node build.mjs           writes src/civetta/api/page/
//   node build.mjs --check   builds in memory; exit 1 where the shipped files differ
//
// build.json beside the files records the SHA-256 of every source and of every file written, so that
// a test without npm sees sources that were changed and not built, and files edited by hand.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { readFile, readdir, mkdir, rm, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";

const WEB = path.dirname(fileURLToPath(import.meta.url));
const SHIPPED = path.join(WEB, "..", "src", "civetta", "api", "page");
const TOOLS = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"];
const NOTICE = "Contains Preact, (c) Jason Miller and contributors, MIT licence: page/licences.txt";

const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");

async function filesBelow(folder) {
  const entries = await readdir(folder, { recursive: true, withFileTypes: true });
  return entries
    .filter((entry) => entry.isFile())
    .map((entry) => path.join(entry.parentPath ?? entry.path, entry.name));
}

async function sourceDigests() {
  const files = [...(await filesBelow(path.join(WEB, "src"))), ...TOOLS.map((name) => path.join(WEB, name))];
  const names = files.map((file) => path.relative(WEB, file).split(path.sep).join("/")).sort();
  const digests = {};
  for (const name of names) digests[name] = sha256(await readFile(path.join(WEB, name)));
  return digests;
}

async function bundled(entry) {
  const result = await build({
    entryPoints: [path.join(WEB, "src", entry)],
    bundle: true,
    minify: true,
    write: false,
    format: "esm",
    target: ["chrome123", "firefox120", "safari17.5"],
    jsx: "automatic",
    jsxImportSource: "preact",
    charset: "utf8",
    legalComments: "none",
    banner: entry.endsWith(".css") ? {} : { js: `/* ${NOTICE} */` },
    loader: { ".svg": "text" },
    logLevel: "warning",
  });
  return Buffer.from(result.outputFiles[0].contents);
}

/** Every shipped file; the page names its files with their version, so that they can be kept for ever. */
async function shippedFiles() {
  const files = {
    "app.js": await bundled("main.tsx"),
    "style.css": await bundled("style.css"),
    "icon.svg": await readFile(path.join(WEB, "src", "icon.svg")),
    "licences.txt": await readFile(path.join(WEB, "node_modules", "preact", "LICENSE")),
  };
  const html = (await readFile(path.join(WEB, "src", "index.html"), "utf8")).replace(
    /"page\/([a-z.]+)"/g,
    (_, name) => `"page/${name}?v=${sha256(files[name]).slice(0, 16)}"`,
  );
  files["index.html"] = Buffer.from(html);
  const written = {};
  for (const name of Object.keys(files).sort()) written[name] = sha256(files[name]);
  const record = { sources: await sourceDigests(), files: written };
  files["build.json"] = Buffer.from(`${JSON.stringify(record, null, 1)}\n`);
  return files;
}

async function differing(files) {
  const found = new Set(await readdir(SHIPPED).catch(() => []));
  const wrong = [...found].filter((name) => !(name in files));
  for (const [name, bytes] of Object.entries(files)) {
    if (!found.has(name) || !bytes.equals(await readFile(path.join(SHIPPED, name)))) wrong.push(name);
  }
  return wrong;
}

const files = await shippedFiles();
if (process.argv.includes("--check")) {
  const wrong = await differing(files);
  if (wrong.length) {
    console.error(`not what the sources build to: ${wrong.join(", ")}; run npm run build`);
    process.exit(1);
  }
} else {
  await rm(SHIPPED, { recursive: true, force: true });
  await mkdir(SHIPPED, { recursive: true });
  for (const [name, bytes] of Object.entries(files)) await writeFile(path.join(SHIPPED, name), bytes);
}
for (const [name, bytes] of Object.entries(files)) console.log(`${name.padEnd(14)} ${bytes.length} bytes`);
