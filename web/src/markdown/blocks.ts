/** Block structure of Markdown: what a chat model writes, a subset of CommonMark with tables. */

export type Align = "left" | "center" | "right" | null;

export type Block =
  | { kind: "paragraph"; text: string }
  | { kind: "heading"; level: number; text: string }
  | { kind: "code"; language: string; text: string; closed: boolean }
  | { kind: "quote"; blocks: Block[] }
  | { kind: "list"; start: number | null; loose: boolean; items: Item[] }
  | { kind: "table"; align: Align[]; head: string[]; rows: string[][] }
  | { kind: "rule" };

export interface Item {
  /** True or false for a task, null for a plain item. */
  checked: boolean | null;
  blocks: Block[];
}

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>[ \t]?/;
const MARKER = /^( {0,3})([-*+]|(\d{1,9})[.)])(?=[ \t]|$)/;
const TASK = /^\[([ xX])\][ \t]+/;
const SEPARATOR = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MAX_DEPTH = 20; // of lists and quotes in one another; deeper markers are text
const MAX_COLUMNS = 64;
const MAX_SEPARATOR = 2000; // characters: the expression may try each blank twice

/** The blocks of a document; unfinished ones, as in the middle of a stream, end with the text. */
export function parseBlocks(source: string): Block[] {
  return blocksOf(source.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocksOf(lines: string[], depth: number): Block[] {
  const reader = new Reader(lines, depth);
  const blocks: Block[] = [];
  for (let block = reader.next(); block; block = reader.next()) blocks.push(block);
  return blocks;
}

class Reader {
  private at = 0;

  constructor(
    private readonly lines: string[],
    private readonly depth: number,
  ) {}

  next(): Block | null {
    while (this.at < this.lines.length && isBlank(this.line)) this.at += 1;
    if (this.at >= this.lines.length) return null;
    const nested = this.depth < MAX_DEPTH;
    return (
      this.fenced() ??
      this.heading() ??
      this.rule() ??
      (nested ? (this.quote() ?? this.list()) : null) ??
      this.table() ??
      this.paragraph()
    );
  }

  private get line(): string {
    return this.lines[this.at] ?? "";
  }

  private fenced(): Block | null {
    const match = FENCE.exec(this.line);
    if (!match) return null;
    const indent = match[1]!.length;
    const fence = match[2]!;
    const language = match[3] ?? "";
    const text: string[] = [];
    for (this.at += 1; this.at < this.lines.length; this.at += 1) {
      const line = this.line.trim();
      if (line.startsWith(fence) && line === fence[0]!.repeat(line.length)) {
        this.at += 1;
        return { kind: "code", language, text: text.join("\n"), closed: true };
      }
      text.push(outdented(this.line, indent));
    }
    return { kind: "code", language, text: text.join("\n"), closed: false };
  }

  private heading(): Block | null {
    const match = HEADING.exec(this.line);
    if (!match) return null;
    const words = this.line.slice(match[0].length).trim();
    const text = words.replace(/(?:^|[ \t])#+$/, "").trim();
    this.at += 1;
    return { kind: "heading", level: match[1]!.length, text };
  }

  private rule(): Block | null {
    if (!RULE.test(this.line)) return null;
    this.at += 1;
    return { kind: "rule" };
  }

  private quote(): Block | null {
    if (!QUOTE.test(this.line)) return null;
    const inner: string[] = [];
    for (; this.at < this.lines.length; this.at += 1) {
      if (QUOTE.test(this.line)) inner.push(this.line.replace(QUOTE, ""));
      else if (isBlank(this.line) || interrupts(this.line) || startsList(this.line)) break;
      else inner.push(this.line);
    }
    return { kind: "quote", blocks: blocksOf(inner, this.depth + 1) };
  }

  private list(): Block | null {
    const first = MARKER.exec(this.line);
    if (!first) return null;
    const items: Item[] = [];
    let loose = false;
    const family = familyOf(first);
    for (let match: RegExpExecArray | null = first; match && familyOf(match) === family; match = this.marker()) {
      const lines = this.itemLines(match);
      const task = TASK.exec(lines[0] ?? "");
      if (task) lines[0] = lines[0]!.slice(task[0].length);
      const blocks = blocksOf(lines, this.depth + 1);
      items.push({ checked: task ? task[1] !== " " : null, blocks });
      loose ||= blocks.filter((block) => block.kind === "paragraph").length > 1;
      const gap = this.at;
      while (this.at < this.lines.length && isBlank(this.line)) this.at += 1;
      if (this.at > gap && this.marker()) loose = true;
    }
    return { kind: "list", start: first[3] === undefined ? null : Number(first[3]), loose, items };
  }

  private marker(): RegExpExecArray | null {
    return this.at < this.lines.length && !RULE.test(this.line) ? MARKER.exec(this.line) : null;
  }

  /** The lines of one item without their indent; `this.at` ends after the last one that is not blank. */
  private itemLines(match: RegExpExecArray): string[] {
    const rest = this.line.slice(match[0].length);
    const blanks = /^[ \t]*/.exec(rest)![0].length;
    const indent = match[0].length + (blanks >= 1 && blanks <= 4 && rest.trim() ? blanks : 1);
    const lines = [rest.slice(Math.min(blanks, indent - match[0].length))];
    let end = this.at + 1;
    let afterBlank = false;
    for (let at = this.at + 1; at < this.lines.length; at += 1) {
      const line = this.lines[at]!;
      if (isBlank(line)) {
        afterBlank = true;
        lines.push("");
        continue;
      }
      const inside = indentOf(line) >= Math.min(indent, 2);
      if (!inside && (afterBlank || MARKER.test(line) || interrupts(line))) break;
      lines.push(outdented(line, indent));
      afterBlank = false;
      end = at + 1;
    }
    lines.length = end - this.at;
    this.at = end;
    return lines;
  }

  private table(): Block | null {
    const under = this.lines[this.at + 1];
    if (under === undefined || !startsTable(this.line, under)) return null;
    const head = cells(this.line);
    const align = cells(under).map(alignOf);
    if (head.length !== align.length || head.length > MAX_COLUMNS) return null;
    const rows: string[][] = [];
    for (this.at += 2; this.at < this.lines.length; this.at += 1) {
      if (isBlank(this.line) || !this.line.includes("|")) break;
      const row = cells(this.line);
      const rest = row.slice(head.length - 1).join(" | "); // no word is lost to a missing column
      rows.push(head.map((_, index) => (index === head.length - 1 ? rest : (row[index] ?? ""))));
    }
    return { kind: "table", align, head, rows };
  }

  private paragraph(): Block {
    const text = [this.line.trimStart()];
    for (this.at += 1; this.at < this.lines.length; this.at += 1) {
      if (isBlank(this.line) || interrupts(this.line) || startsTable(this.line, this.lines[this.at + 1])) break;
      if (startsList(this.line) && this.depth < MAX_DEPTH) break;
      text.push(this.line.trimStart());
    }
    return { kind: "paragraph", text: text.join("\n").trimEnd() };
  }
}

function isBlank(line: string): boolean {
  return !line.trim();
}

/** Whether the line begins a block that ends a paragraph before it. */
function interrupts(line: string): boolean {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function startsTable(line: string, under: string | undefined): boolean {
  if (!line.includes("|") || under === undefined || under.length > MAX_SEPARATOR) return false;
  return SEPARATOR.test(under);
}

/** A number other than 1 after a line of text is part of the text: "in\n1984. Then ...". */
function startsList(line: string): boolean {
  const match = MARKER.exec(line);
  return match !== null && line.length > match[0].length && (match[3] ?? "1") === "1";
}

function familyOf(match: RegExpExecArray): string {
  return match[3] === undefined ? match[2]! : match[2]!.slice(-1);
}

function indentOf(line: string): number {
  let columns = 0;
  for (const char of line) {
    if (char === " ") columns += 1;
    else if (char === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

/** The line without up to `columns` of its leading blanks. */
function outdented(line: string, columns: number): string {
  let at = 0;
  let seen = 0;
  while (at < line.length && seen < columns && (line[at] === " " || line[at] === "\t")) {
    seen += line[at] === "\t" ? 4 - (seen % 4) : 1;
    at += 1;
  }
  return " ".repeat(Math.max(0, seen - columns)) + line.slice(at);
}

function cells(line: string): string[] {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function alignOf(cell: string): Align {
  const left = cell.startsWith(":");
  const right = cell.endsWith(":");
  return left && right ? "center" : left ? "left" : right ? "right" : null;
}
