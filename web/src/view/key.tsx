/** Asks for the server's API key. */

import { useRef } from "preact/hooks";
import { Dialog } from "./dialog.tsx";

export interface KeyQuestion {
  wrong: boolean;
  answer: (key: string | null) => void;
}

export function KeyDialog({ question }: { question: KeyQuestion }) {
  const input = useRef<HTMLInputElement>(null);
  const submit = (event: Event) => {
    event.preventDefault();
    question.answer(input.current?.value.trim() || null);
  };
  return (
    <Dialog title="API key" onClose={() => question.answer(null)}>
      <form onSubmit={submit}>
        {question.wrong && (
          <p class="note error" role="alert">
            The server does not accept this key.
          </p>
        )}
        <label class="field">
          <span>Key of this server</span>
          <input ref={input} type="password" autocomplete="off" required autofocus spellcheck={false} />
        </label>
        <p class="hint">Kept for this tab only; it goes to this server and nowhere else.</p>
        <div class="row">
          <button type="button" onClick={() => question.answer(null)}>
            Cancel
          </button>
          <button type="submit" class="primary">
            Use key
          </button>
        </div>
      </form>
    </Dialog>
  );
}
