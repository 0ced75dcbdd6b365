/** Markdown as elements. Every text becomes a text node: no string of a reply is ever parsed as HTML. */

import { Component, type ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";
import { type Align, type Block, type Item, parseBlocks } from "../markdown/blocks.ts";
import { type Inline, parseInline } from "../markdown/inline.ts";
import { CopyButton } from "./copy.tsx";

export function Markdown({ source }: { source: string }) {
  const blocks = useMemo(() => parseBlocks(source), [source]);
  return <div class="markdown">{blocks.map((block, index) => <BlockView key={index} block={block} />)}</div>;
}

/** One block; while a reply streams, only the last one differs from the drawing before. */
class BlockView extends Component<{ block: Block }> {
  override shouldComponentUpdate(next: { block: Block }): boolean {
    return !same(this.props.block, next.block);
  }

  override render() {
    return draw(this.props.block);
  }
}

function draw(block: Block): ComponentChildren {
  switch (block.kind) {
    case "paragraph":
      return <p>{inline(block.text)}</p>;
    case "heading":
      return <Heading level={block.level}>{inline(block.text)}</Heading>;
    case "code":
      return <Code language={block.language} text={block.text} />;
    case "quote":
      return <blockquote>{block.blocks.map((inner, index) => <BlockView key={index} block={inner} />)}</blockquote>;
    case "list":
      return <List block={block} />;
    case "table":
      return <Table block={block} />;
    case "rule":
      return <hr />;
  }
}

/** The page's own headings are of levels 1 and 2; those of a reply begin below. */
function Heading({ level, children }: { level: number; children: ComponentChildren }) {
  if (level <= 1) return <h3 class="big">{children}</h3>;
  if (level === 2) return <h3>{children}</h3>;
  return level === 3 ? <h4>{children}</h4> : <h5>{children}</h5>;
}

export function Code({ language, text }: { language: string; text: string }) {
  return (
    <figure class="code">
      <figcaption>
        <span>{language || "text"}</span>
        <CopyButton text={text} what="code" />
      </figcaption>
      <pre tabIndex={0}>
        <code>{text}</code>
      </pre>
    </figure>
  );
}

function List({ block }: { block: Extract<Block, { kind: "list" }> }) {
  const items = block.items.map((item, index) => <ListItem key={index} item={item} loose={block.loose} />);
  return block.start === null ? <ul>{items}</ul> : <ol start={block.start}>{items}</ol>;
}

function ListItem({ item, loose }: { item: Item; loose: boolean }) {
  const children = item.blocks.map((inner, index) =>
    inner.kind === "paragraph" && !loose ? inline(inner.text) : <BlockView key={index} block={inner} />,
  );
  if (item.checked === null) return <li>{children}</li>;
  return (
    <li class="task">
      <input type="checkbox" checked={item.checked} disabled aria-label={item.checked ? "done" : "open"} /> {children}
    </li>
  );
}

function Table({ block }: { block: Extract<Block, { kind: "table" }> }) {
  return (
    <div class="table" tabIndex={0} role="region" aria-label="Table">
      <table>
        <thead>
          <tr>
            {block.head.map((cell, index) => (
              <th key={index} scope="col" class={side(block.align[index])}>
                {inline(cell)}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {block.rows.map((row, at) => (
            <tr key={at}>
              {row.map((cell, index) => (
                <td key={index} class={side(block.align[index])}>
                  {inline(cell)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function side(align: Align | undefined): string {
  return align ? `to-${align}` : "";
}

function inline(source: string): ComponentChildren {
  return parseInline(source).map(element);
}

function element(node: Inline, index: number): ComponentChildren {
  switch (node.kind) {
    case "text":
      return node.text;
    case "code":
      return <code key={index}>{node.text}</code>;
    case "break":
      return <br key={index} />;
    case "strong":
      return <strong key={index}>{node.children.map(element)}</strong>;
    case "em":
      return <em key={index}>{node.children.map(element)}</em>;
    case "strike":
      return <s key={index}>{node.children.map(element)}</s>;
    case "link":
      return (
        <a key={index} href={node.href} title={node.href} target="_blank" rel="noopener noreferrer nofollow">
          {node.children.map(element)}
        </a>
      );
  }
}

/** Deep equality of parsed blocks. */
function same(a: unknown, b: unknown): boolean {
  if (a === b) return true;
  if (typeof a !== "object" || typeof b !== "object" || !a || !b) return false;
  const left = Object.entries(a);
  const right = b as Record<string, unknown>;
  return left.length === Object.keys(b).length && left.every(([key, value]) => same(value, right[key]));
}
