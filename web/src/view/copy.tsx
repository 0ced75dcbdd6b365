import { useEffect, useState } from "preact/hooks";
import { copyText } from "../clipboard.ts";
import { Icon } from "./icons.tsx";

/** Copies `text`; says for a moment that it did. */
export function CopyButton({ text, what }: { text: string; what: string }) {
  const [copied, setCopied] = useState(false);
  useEffect(() => {
    const timer = copied ? setTimeout(() => setCopied(false), 1500) : undefined;
    return () => clearTimeout(timer);
  }, [copied]);
  const label = copied ? "Copied" : `Copy ${what}`;
  return (
    <button type="button" class="quiet" aria-label={label} title={label} onClick={async () => setCopied(await copyText(text))}>
      <Icon name={copied ? "check" : "copy"} />
    </button>
  );
}
