/** One message of the conversation: what was said, how it ended, what it cost, what can be done with it. */

import { useEffect, useRef, useState } from "preact/hooks";
import type { Figures } from "../server/reply.ts";
import type { Message } from "../state/types.ts";
import { CopyButton } from "./copy.tsx";
import { Icon } from "./icons.tsx";
import { Code, Markdown } from "./markdown.tsx";
import { percent, rate } from "./numbers.ts";

interface Actions {
  busy: boolean;
  onAgain: () => void;
  onEdit: (text: string) => void;
}

export function MessageView({ message, progress, ...actions }: { message: Message; progress: number | undefined } & Actions) {
  return message.role === "user" ? (
    <UserMessage message={message} {...actions} />
  ) : (
    <AssistantMessage message={message} progress={progress} {...actions} />
  );
}

function UserMessage({ message, busy, onEdit }: { message: Message } & Actions) {
  const [editing, setEditing] = useState(false);
  const done = (text: string | null) => {
    setEditing(false);
    if (text !== null) onEdit(text);
  };
  return (
    <article class="message user">
      <h2 class="offscreen">You</h2>
      {message.pictures.length > 0 && (
        <div class="pictures">
          {message.pictures.map((url, index) => (
            <img key={index} src={url} alt={`Picture ${index + 1} of your message`} />
          ))}
        </div>
      )}
      {editing ? <Editor text={message.text} onDone={done} /> : message.text && <div class="bubble">{message.text}</div>}
      {!editing && (
        <div class="actions">
          <CopyButton text={message.text} what="message" />
          <button type="button" class="quiet" disabled={busy} aria-label="Edit message" title="Edit message" onClick={() => setEditing(true)}>
            <Icon name="edit" />
          </button>
        </div>
      )}
    </article>
  );
}

function Editor({ text, onDone }: { text: string; onDone: (text: string | null) => void }) {
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => area.current?.focus(), []);
  const submit = (event: Event) => {
    event.preventDefault();
    const edited = area.current?.value.trim() ?? "";
    onDone(edited || null);
  };
  return (
    <form class="editor" onSubmit={submit} onKeyDown={(event) => event.key === "Escape" && onDone(null)}>
      <textarea ref={area} defaultValue={text} aria-label="Your message" rows={Math.min(12, text.split("\n").length + 1)} />
      <div class="row">
        <button type="button" onClick={() => onDone(null)}>
          Cancel
        </button>
        <button type="submit" class="primary">
          Send again
        </button>
      </div>
    </form>
  );
}

function AssistantMessage({ message, progress, busy, onAgain }: { message: Message; progress: number | undefined } & Actions) {
  const running = message.ending === "running";
  return (
    <article class="message assistant" aria-busy={running}>
      <h2 class="offscreen">civetta</h2>
      {message.thought && <Thought message={message} />}
      {message.text && <Markdown source={message.text} />}
      {message.calls.map((call, index) => (
        <Code key={index} language="tool call" text={call} />
      ))}
      {running && !message.text && !message.thought && <Waiting progress={progress} />}
      <Note message={message} />
      {!running && (
        <div class="actions">
          {message.text && <CopyButton text={message.text} what="reply" />}
          <button type="button" class="quiet" disabled={busy} aria-label="Ask again" title="Ask again" onClick={onAgain}>
            <Icon name="again" />
          </button>
          {message.figures && <FigureLine figures={message.figures} />}
        </div>
      )}
    </article>
  );
}

function Waiting({ progress }: { progress: number | undefined }) {
  const reading = progress !== undefined && progress > 0 && progress < 1;
  return (
    <p class="waiting">
      <span class="dots" aria-hidden="true" />
      {reading ? `Reading the prompt: ${percent(progress)}` : "Waiting"}
    </p>
  );
}

/** Open while the model thinks, folded once it answers; after that it stays as the person put it. */
function Thought({ message }: { message: Message }) {
  const [chosen, setChosen] = useState<boolean | null>(null);
  const thinking = message.ending === "running" && !message.text;
  const open = chosen ?? thinking;
  const label = thinking ? "Thinking" : "Thought";
  const time = message.thoughtMs === null ? "" : ` for ${seconds(message.thoughtMs)}`;
  const toggle = (event: Event) => {
    event.preventDefault();
    setChosen(!open);
  };
  return (
    <details class={thinking ? "thought thinking" : "thought"} open={open}>
      <summary onClick={toggle}>
        {label}
        {time}
      </summary>
      <div class="thought-text">{message.thought.trim()}</div>
    </details>
  );
}

function Note({ message }: { message: Message }) {
  if (message.ending === "failed") {
    return (
      <p class="note error" role="alert">
        {message.error}
      </p>
    );
  }
  if (message.ending === "stopped") return <p class="note">Stopped.</p>;
  if (message.ending === "length") return <p class="note">Cut off: the token limit was reached.</p>;
  return null;
}

function FigureLine({ figures }: { figures: Figures }) {
  const cached = figures.cachedTokens ? ` (${figures.cachedTokens} from the cache)` : "";
  const parts = [
    `${figures.replyTokens} tokens at ${rate(figures.replyPerS)}`,
    `prompt ${figures.promptTokens}${cached} at ${rate(figures.promptPerS)}`,
  ];
  if (figures.draftTokens) parts.push(`drafts ${percent(figures.draftAccepted / figures.draftTokens)} accepted`);
  return <span class="figures">{parts.join(" · ")}</span>;
}

function seconds(ms: number): string {
  return ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`;
}
