/** Inline Markdown to a tree. Text stays text: nothing here can become markup of the page. */

export type Inline =
  | { kind: "text"; text: string }
  | { kind: "code"; text: string }
  | { kind: "break" }
  | { kind: "strong" | "em" | "strike"; depth: number; children: Inline[] }
  | { kind: "link"; href: string; children: Inline[] };

/** A run of `*`, `_` or `~` that may open or close emphasis, as it waits in the list of nodes. */
interface Run {
  kind: "run";
  mark: string;
  length: number;
  opens: boolean;
  closes: boolean;
}

interface Bracket {
  kind: "bracket";
  image: boolean;
}

type Node = Inline | Run | Bracket;

const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const BARE_URL = /https?:\/\/[^\s<>"'`\u0000-\u001f]+/y;
const ANGLE_URL = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const ENTITY = /&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6}));/y;
// Blanks are bounded so that a long run of them cannot be split in quadratically many ways.
const LINK_TAIL =
  /\(\s{0,9}(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s{1,9}(?:"[^"]*"|'[^']*'))?\s{0,9}\)/y;
const MAX_DEPTH = 30; // of emphasis in emphasis; the drawing recurses

/** The address when its scheme is one that a link may have, else null. */
export function safeHref(address: string): string | null {
  const trimmed = address.trim();
  if (!/^(?:https?:\/\/|mailto:)/i.test(trimmed)) return null;
  try {
    const url = new URL(trimmed);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** The inline tree of one paragraph, heading or cell. Takes time linear in the text. */
export function parseInline(source: string): Inline[] {
  return new InlineParser(source).parse();
}

class InlineParser {
  private readonly nodes: Node[] = [];
  private readonly brackets: number[] = [];
  private readonly missingTicks = new Set<number>();
  private text = "";
  private at = 0;

  constructor(private readonly source: string) {}

  parse(): Inline[] {
    while (this.at < this.source.length) this.step();
    this.flush();
    return emphasised(this.nodes);
  }

  private step(): void {
    const char = this.source[this.at]!;
    switch (char) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "\n":
        return this.lineBreak();
      case "*":
      case "_":
      case "~":
        return this.run(char);
      case "!":
        if (this.source[this.at + 1] === "[") return this.open(true);
        break;
      case "[":
        return this.open(false);
      case "]":
        return this.close();
      case "<":
        if (this.address(ANGLE_URL)) return;
        break;
      case "&":
        if (this.entity()) return;
        break;
      case "h":
        if (!/\w/.test(this.source[this.at - 1] ?? "") && this.address(BARE_URL)) return;
    }
    this.text += char;
    this.at += 1;
  }

  private escape(): void {
    const next = this.source[this.at + 1] ?? "";
    if (next === "\n") {
      this.push({ kind: "break" });
    } else {
      this.text += /[!-/:-@[-`{-~]/.test(next) ? next : `\\${next}`;
    }
    this.at += 1 + next.length;
  }

  private code(): void {
    const ticks = /`+/y;
    ticks.lastIndex = this.at;
    const opener = ticks.exec(this.source)![0];
    const start = this.at + opener.length;
    const end = this.missingTicks.has(opener.length) ? -1 : closingTicks(this.source, start, opener.length);
    if (end < 0) {
      this.missingTicks.add(opener.length);
      this.text += opener;
      this.at = start;
      return;
    }
    let text = this.source.slice(start, end).replaceAll("\n", " ");
    if (/^ .* $/.test(text) && text.trim()) text = text.slice(1, -1);
    this.push({ kind: "code", text });
    this.at = end + opener.length;
  }

  private lineBreak(): void {
    this.text = this.text.trimEnd();
    this.push({ kind: "break" });
    this.at += 1;
  }

  private run(mark: string): void {
    let end = this.at;
    while (this.source[end] === mark) end += 1;
    const before = this.source[this.at - 1] ?? " ";
    const after = this.source[end] ?? " ";
    const left = flanks(before, after);
    const right = flanks(after, before);
    const word = mark === "_";
    const node: Run = {
      kind: "run",
      mark,
      length: end - this.at,
      opens: left && (!word || !right || PUNCTUATION.test(before)),
      closes: right && (!word || !left || PUNCTUATION.test(after)),
    };
    if ((mark === "~" && node.length !== 2) || !(node.opens || node.closes)) {
      this.text += this.source.slice(this.at, end);
    } else {
      this.push(node);
    }
    this.at = end;
  }

  private open(image: boolean): void {
    this.push({ kind: "bracket", image });
    this.brackets.push(this.nodes.length - 1);
    this.at += image ? 2 : 1;
  }

  private close(): void {
    this.at += 1;
    const opener = this.brackets.pop();
    LINK_TAIL.lastIndex = this.at;
    const tail = opener === undefined ? null : LINK_TAIL.exec(this.source);
    const href = tail && safeHref(unescaped(tail[1] ?? tail[2] ?? ""));
    if (opener === undefined || !tail || !href) {
      this.text += "]";
      return;
    }
    this.flush();
    const image = (this.nodes[opener] as Bracket).image;
    const children = emphasised(this.nodes.slice(opener + 1));
    this.nodes.length = opener;
    if (!image) this.brackets.length = 0; // a link holds no link
    // Pictures of a reply are never fetched: what it would load, it could use to send.
    const label = children.length ? children : [{ kind: "text" as const, text: href }];
    this.nodes.push({ kind: "link", href, children: withoutLinks(label) });
    this.at += tail[0].length;
  }

  private address(form: RegExp): boolean {
    form.lastIndex = this.at;
    const match = form.exec(this.source);
    if (!match) return false;
    const shown = match[1] ?? trimmedUrl(match[0]);
    const href = safeHref(shown);
    if (!href) return false;
    this.push({ kind: "link", href, children: [{ kind: "text", text: shown }] });
    this.at += match[1] === undefined ? shown.length : match[0].length;
    return true;
  }

  private entity(): boolean {
    ENTITY.lastIndex = this.at;
    const match = ENTITY.exec(this.source);
    if (!match) return false;
    const point = match[2] ? Number(match[2]) : Number.parseInt(match[3] ?? "0", 16);
    const valid = point > 0 && point <= 0x10ffff && !(point >= 0xd800 && point <= 0xdfff);
    this.text += match[1] ? ENTITIES[match[1]] : valid ? String.fromCodePoint(point) : "\ufffd";
    this.at += match[0].length;
    return true;
  }

  private push(node: Node): void {
    this.flush();
    this.nodes.push(node);
  }

  private flush(): void {
    if (this.text) this.nodes.push({ kind: "text", text: this.text });
    this.text = "";
  }
}

function closingTicks(source: string, from: number, length: number): number {
  const ticks = /`+/g;
  ticks.lastIndex = from;
  for (let match = ticks.exec(source); match; match = ticks.exec(source)) {
    if (match[0].length === length) return match.index;
  }
  return -1;
}

/** Whether a run between these two characters leans on the second one. */
function flanks(before: string, after: string): boolean {
  if (/\s/.test(after)) return false;
  return !PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before);
}

function unescaped(text: string): string {
  return text.replace(/\\([!-/:-@[-`{-~])/g, "$1");
}

/** A bare address without the punctuation of the sentence around it. */
function trimmedUrl(url: string): string {
  let unopened = count(url, ")") - count(url, "(");
  let end = url.length;
  while (end && /[.,;:!?*_~)\]]/.test(url[end - 1]!)) {
    if (url[end - 1] === ")") {
      if (unopened <= 0) break;
      unopened -= 1;
    }
    end -= 1;
  }
  return url.slice(0, end);
}

function count(text: string, char: string): number {
  return text.split(char).length - 1;
}

function withoutLinks(nodes: Inline[]): Inline[] {
  return nodes.flatMap((node) => (node.kind === "link" ? node.children : [node]));
}

function emphasised(nodes: Node[]): Inline[] {
  return new Emphasis(nodes).result;
}

/**
 * Pairs runs of emphasis, innermost first, in the manner of CommonMark's delimiter stack.
 *
 * `bottom` remembers below which opener a kind of closer found nothing, which keeps the time linear.
 */
class Emphasis {
  private readonly done: Node[] = [];
  private readonly openers: number[] = [];
  private readonly bottom = new Map<string, number>();

  constructor(nodes: Node[]) {
    for (const node of nodes) {
      if (node.kind === "run") this.add({ ...node });
      else this.done.push(node);
    }
  }

  get result(): Inline[] {
    return this.done.map(plain);
  }

  private add(run: Run): void {
    while (run.closes && run.length && this.close(run));
    if (!run.length) return;
    this.done.push(run);
    if (run.opens) this.openers.push(this.done.length - 1);
  }

  private close(closer: Run): boolean {
    const key = `${closer.mark}${closer.opens}${closer.length % 3}`;
    const bottom = this.bottom.get(key) ?? 0;
    let place = this.openers.length - 1;
    while (place >= bottom && !pairs(this.done[this.openers[place]!] as Run, closer)) place -= 1;
    if (place < bottom) {
      this.bottom.set(key, this.openers.length);
      return false;
    }
    return this.wrap(place, closer);
  }

  private wrap(place: number, closer: Run): boolean {
    const at = this.openers[place]!;
    const opener = this.done[at] as Run;
    const depth = 1 + this.done.slice(at + 1).reduce((most, node) => Math.max(most, depthOf(node)), 0);
    if (depth > MAX_DEPTH) return false;
    const width = closer.mark === "~" || (opener.length > 1 && closer.length > 1) ? 2 : 1;
    const children = this.done.splice(at + 1).map(plain);
    opener.length -= width;
    closer.length -= width;
    if (!opener.length) this.done.pop();
    this.forget(opener.length ? place + 1 : place);
    const kind = closer.mark === "~" ? "strike" : width === 2 ? "strong" : "em";
    this.done.push({ kind, depth, children });
    return true;
  }

  private forget(kept: number): void {
    this.openers.length = kept;
    for (const [key, bottom] of this.bottom) this.bottom.set(key, Math.min(bottom, kept));
  }
}

function depthOf(node: Node): number {
  return "depth" in node ? node.depth : 0;
}

function pairs(opener: Run, closer: Run): boolean {
  if (opener.mark !== closer.mark) return false;
  const odd = (opener.closes || closer.opens) && (opener.length + closer.length) % 3 === 0;
  return !odd || (opener.length % 3 === 0 && closer.length % 3 === 0);
}

function plain(node: Node): Inline {
  if (node.kind === "run") return { kind: "text", text: node.mark.repeat(node.length) };
  if (node.kind === "bracket") return { kind: "text", text: node.image ? "![" : "[" };
  return node;
}
