import assert from "node:assert/strict";
import { test } from "node:test";
import { type Block, parseBlocks } from "../src/markdown/blocks.ts";
import { type Inline, parseInline, safeHref } from "../src/markdown/inline.ts";

/** The tree in short: *em*, **strong**, `code`, [label](href), / for a break. */
function brief(nodes: Inline[]): string {
  return nodes
    .map((node) => {
      switch (node.kind) {
        case "text":
          return node.text;
        case "code":
          return `<code ${node.text}>`;
        case "break":
          return "/";
        case "link":
          return `<${node.href} ${brief(node.children)}>`;
        default:
          return `<${node.kind} ${brief(node.children)}>`;
      }
    })
    .join("");
}

const CASES: [string, string][] = [
  ["plain", "plain"],
  ["*a* _b_ **c** __d__ ~~e~~", "<em a> <em b> <strong c> <strong d> <strike e>"],
  ["***both***", "<em <strong both>>"],
  ["**a *b* c**", "<strong a <em b> c>"],
  ["*a **b** c*", "<em a <strong b> c>"],
  ["snake_case_name and 2 * 3 * 4", "snake_case_name and 2 * 3 * 4"],
  ["**open", "**open"],
  ["`a * b` ``c ` d`` `open", "<code a * b> <code c ` d> `open"],
  ["\\*not\\* \\a", "*not* \\a"],
  ["[x](https://a.b/c) [y]( <https://a.b/d e> 't' )", "<https://a.b/c x> <https://a.b/d%20e y>"],
  ["[**x**](https://a.b)", "<https://a.b/ <strong x>>"],
  ["[x](javascript:alert(1)) [y](data:text/html,z) [z](/local)", "[x](javascript:alert(1)) [y](data:text/html,z) [z](/local)"],
  ["![alt](https://a.b/p.png)", "<https://a.b/p.png alt>"],
  ["[![alt](https://a.b/p.png)](https://c.d)", "<https://c.d/ alt>"],
  ["[a [b](https://c.d) e](https://f.g)", "[a <https://c.d/ b> e](<https://f.g/ https://f.g>)"],
  ["see https://a.b/c_d_(e). Next", "see <https://a.b/c_d_(e) https://a.b/c_d_(e)>. Next"],
  ["(https://a.b)", "(<https://a.b/ https://a.b>)"],
  ["<https://a.b> <b>", "<https://a.b/ https://a.b> <b>"],
  ["&lt;b&gt; &amp; &#65; &#x42; &#0; &nope;", "<b> & A B \ufffd &nope;"],
  ["one\ntwo\\\nthree", "one/two/three"],
];

for (const [source, wanted] of CASES) {
  test(`inline: ${JSON.stringify(source)}`, () => assert.equal(brief(parseInline(source)), wanted));
}

test("links lead to http, https and mail alone, however they are spelled", () => {
  for (const bad of ["javascript:1", " JaVaScript:1", "java\nscript:1", "data:a", "vbscript:1", "file:///x", "//a.b", "http://", "blob:x"]) {
    assert.equal(safeHref(bad), null, bad);
  }
  assert.equal(safeHref("HTTPS://a.b"), "https://a.b/");
  assert.equal(safeHref("mailto:a@b.c"), "mailto:a@b.c");
});

function kinds(blocks: Block[]): string {
  return blocks
    .map((block) => {
      if (block.kind === "list") return `list(${block.items.map((item) => kinds(item.blocks)).join("|")})`;
      if (block.kind === "quote") return `quote(${kinds(block.blocks)})`;
      if (block.kind === "code") return `code:${block.language}:${block.text}`;
      return block.kind;
    })
    .join(" ");
}

const BLOCKS: [string, string][] = [
  ["a\nb\n\nc", "paragraph paragraph"],
  ["# a\nb\n---\n***", "heading paragraph rule rule"],
  ["```py\nx = 1\n```\nafter", "code:py:x = 1 paragraph"],
  ["~~~\n```\n~~~", "code::```"],
  ["```js\nnever ended", "code:js:never ended"],
  ["- a\n- b\n  - c\n\n    d\n- e", "list(paragraph|paragraph list(paragraph paragraph)|paragraph)"],
  ["1. a\n   ```\n   x\n   ```\n2. b", "list(paragraph code::x|paragraph)"],
  ["text\n1. a", "paragraph list(paragraph)"],
  ["In\n1984. Then", "paragraph"],
  ["> a\n> > b\n> - c", "quote(paragraph quote(paragraph) list(paragraph))"],
  ["|a|b|\n|-|:-:|\n|1|2|3|\n\nx", "table paragraph"],
  ["a | b\nno table", "paragraph"],
  ["- [x] done\n- [ ] open", "list(paragraph|paragraph)"],
  ["", ""],
];

for (const [source, wanted] of BLOCKS) {
  test(`blocks: ${JSON.stringify(source)}`, () => assert.equal(kinds(parseBlocks(source)), wanted));
}

test("cells keep to the number of columns and lose nothing, escaped bars stay", () => {
  const [table] = parseBlocks("a | b\n:-|-:\n1\\|2 | 3 | 4\n5 |");
  assert.deepEqual(table, {
    kind: "table",
    align: ["left", "right"],
    head: ["a", "b"],
    rows: [["1|2", "3 | 4"], ["5", ""]],
  });
});

/** Every text of every tree. */
function texts(blocks: Block[]): string {
  const inline = (nodes: Inline[]): string =>
    nodes.map((node) => ("children" in node ? inline(node.children) : "text" in node ? node.text : "")).join("");
  return blocks
    .map((block) => {
      if (block.kind === "list") return block.items.map((item) => texts(item.blocks)).join("");
      if (block.kind === "quote") return texts(block.blocks);
      if (block.kind === "code") return block.text;
      if (block.kind === "table") return [block.head, ...block.rows].flat().map((cell) => inline(parseInline(cell))).join("");
      return block.kind === "rule" ? "" : inline(parseInline(block.text));
    })
    .join("");
}

test("no letter of a random document is lost, at any place where a stream may stand", () => {
  let state = 7;
  const random = (below: number): number => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return Math.floor((state / 2147483648) * below);
  };
  const pieces = ["\n", "\n\n", "*", "**", "_", "`", "```\n", "[", "](", ")", "> ", "- ", "1. ", "# ", "|", "~~", "<b>", "!", "  ", "\\"];
  for (let round = 0; round < 300; round += 1) {
    let source = "";
    for (let at = 0; at < 40; at += 1) source += random(2) ? pieces[random(pieces.length)] : String.fromCharCode(65 + random(26));
    const letters = (text: string) => text.replace(/[^A-Z]/g, "");
    for (const end of [source.length, random(source.length)]) {
      const part = source.slice(0, end);
      // The word after a fence is its language, and a link's address is no text.
      if (/```|~~~|\]\(/.test(part)) parseBlocks(part).forEach((block) => kinds([block]));
      else assert.equal(letters(texts(parseBlocks(part))), letters(part), JSON.stringify(part));
    }
  }
});

const LARGE = 60_000;
const FLOODS = ["*", "_", "**a ", "*a _b ", "*a **b ", "[", "](", "[](", "![", "`", "` `` ", "<", "&", "~~", "> ", "- ", "|", "#", " ", "(((", "http://", "https://a.b/)", "*_", "[a](", "a  \n", "\\", "[x](https://a.b ", "-|", "1. ", "\t"];

test("a flood of one mark takes time in proportion to its length", () => {
  const spent = (length: number): number => {
    const before = process.cpuUsage();
    for (const mark of FLOODS) {
      const source = mark.repeat(Math.ceil(length / mark.length));
      texts(parseBlocks(source));
      parseInline(source);
    }
    const used = process.cpuUsage(before);
    return used.user + used.system;
  };
  spent(LARGE / 8); // the compiler's share
  const short = spent(LARGE / 2);
  const long = spent(LARGE);
  assert.ok(long < 4 * short + 500_000, `${short} us for the half, ${long} us for the whole`);
});

test("nesting is bounded", () => {
  const depth = (nodes: Inline[]): number => Math.max(0, ...nodes.map((node) => ("children" in node ? 1 + depth(node.children) : 0)));
  assert.ok(depth(parseInline(`${"*_".repeat(500)}a${"_*".repeat(500)}`)) <= 31);
  const blockDepth = (blocks: Block[]): number =>
    Math.max(0, ...blocks.map((block) => (block.kind === "quote" ? 1 + blockDepth(block.blocks) : block.kind === "list" ? 1 + Math.max(...block.items.map((item) => blockDepth(item.blocks))) : 0)));
  assert.ok(blockDepth(parseBlocks("> ".repeat(500) + "a")) <= 20);
  assert.ok(blockDepth(parseBlocks("- ".repeat(500) + "a")) <= 20);
});
