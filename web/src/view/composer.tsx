/** The box a message is written in: text, pictures (pasted, dropped or picked), send, stop. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { pictureFiles, pictureOf } from "../pictures.ts";
import { isTouch } from "./device.ts";
import { Icon } from "./icons.tsx";

interface Props {
  busy: boolean;
  /** Whether the model looks at pictures. */
  pictures: boolean;
  /** Changes where another conversation is opened: the box gets the focus. */
  focusKey: string;
  onSend: (text: string, pictures: string[]) => void;
  onStop: () => void;
}

const MAX_HEIGHT_PX = 220;

export function Composer({ busy, pictures: seesPictures, focusKey, onSend, onStop }: Props) {
  const [text, setText] = useState("");
  const { pictures, problem, add, drop, clear } = usePictures(seesPictures);
  const area = useRef<HTMLTextAreaElement>(null);
  const dragging = useDropTarget(add);

  useLayoutEffect(() => fit(area.current), [text]);
  useEffect(() => {
    if (!isTouch()) area.current?.focus();
  }, [focusKey]);

  const ready = !busy && (text.trim() !== "" || pictures.length > 0);
  const submit = () => {
    if (!ready) return;
    onSend(text.trim(), pictures);
    setText("");
    clear();
    area.current?.focus();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.isComposing) return; // Enter ends the input of a word in Japanese and others
    const plainEnter = event.key === "Enter" && !event.shiftKey && !isTouch();
    if (plainEnter || (event.key === "Enter" && (event.ctrlKey || event.metaKey))) {
      event.preventDefault();
      submit();
    }
  };
  const onPaste = (event: ClipboardEvent) => {
    const files = event.clipboardData ? pictureFiles(event.clipboardData) : [];
    if (!files.length) return;
    event.preventDefault();
    void add(files);
  };

  return (
    <form
      class="composer column"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      {problem && (
        <p class="note error" role="alert">
          {problem}
        </p>
      )}
      {pictures.length > 0 && (
        <ul class="attached" aria-label="Pictures to send">
          {pictures.map((url, index) => (
            <li key={url}>
              <img src={url} alt={`Picture ${index + 1} to send`} />
              <button type="button" aria-label={`Remove picture ${index + 1}`} onClick={() => drop(index)}>
                <Icon name="close" />
              </button>
            </li>
          ))}
        </ul>
      )}
      <div class="box">
        {seesPictures ? <PictureButton onFiles={add} /> : <span class="indent" />}
        <textarea
          ref={area}
          rows={1}
          value={text}
          placeholder="Message"
          aria-label="Message"
          enterkeyhint="enter"
          autocapitalize="sentences"
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={onKeyDown}
          onPaste={onPaste}
        />
        {busy ? (
          <button type="button" class="round stop" aria-label="Stop" title="Stop (Esc)" onClick={onStop}>
            <Icon name="stop" />
          </button>
        ) : (
          <button type="submit" class="round primary" aria-label="Send" title="Send (Enter)" disabled={!ready}>
            <Icon name="send" />
          </button>
        )}
      </div>
      {dragging && (
        <div class="drop" aria-hidden="true">
          Drop pictures here
        </div>
      )}
    </form>
  );
}

function PictureButton({ onFiles }: { onFiles: (files: File[]) => Promise<void> }) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <button
        type="button"
        class="round quiet"
        aria-label="Add pictures"
        title="Add pictures (or paste, or drop them)"
        onClick={() => input.current?.click()}
      >
        <Icon name="picture" />
      </button>
      <input
        ref={input}
        type="file"
        accept="image/*"
        multiple
        hidden
        aria-label="Picture files"
        onChange={(event) => {
          void onFiles(pictureFiles(event.currentTarget.files));
          event.currentTarget.value = ""; // the same file can be picked again
        }}
      />
    </>
  );
}

function usePictures(allowed: boolean) {
  const [pictures, setPictures] = useState<string[]>([]);
  const [problem, setProblem] = useState("");
  const add = async (files: File[]) => {
    if (!files.length) return;
    setProblem(allowed ? "" : "This model does not look at pictures.");
    if (!allowed) return;
    for (const file of files) {
      try {
        const url = await pictureOf(file, file.name);
        setPictures((before) => (before.includes(url) ? before : [...before, url]));
      } catch (error) {
        setProblem(error instanceof Error ? error.message : String(error));
      }
    }
  };
  const drop = (index: number) => setPictures((before) => before.filter((_, at) => at !== index));
  return { pictures, problem, add, drop, clear: () => setPictures([]) };
}

/** Whether pictures are being dragged over the page; takes those that are dropped. */
function useDropTarget(onFiles: (files: File[]) => Promise<void>): boolean {
  const [dragging, setDragging] = useState(false);
  const take = useRef(onFiles);
  take.current = onFiles;
  useEffect(() => {
    const over = (event: DragEvent) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      setDragging(true);
    };
    const leave = (event: DragEvent) => event.relatedTarget === null && setDragging(false);
    const dropped = (event: DragEvent) => {
      event.preventDefault(); // else the browser would open the file in place of the page
      setDragging(false);
      if (event.dataTransfer) void take.current(pictureFiles(event.dataTransfer));
    };
    addEventListener("dragover", over);
    addEventListener("dragleave", leave);
    addEventListener("drop", dropped);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", dropped);
    };
  }, []);
  return dragging;
}

function fit(area: HTMLTextAreaElement | null): void {
  if (!area) return;
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, MAX_HEIGHT_PX)}px`;
}
