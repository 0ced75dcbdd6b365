/** The page: conversations at the left, messages in the middle, the monitor at the right. */

import { useEffect, useState } from "preact/hooks";
import type { Client, ModelCard } from "../server/client.ts";
import { ServerError } from "../server/client.ts";
import type { Chats } from "../state/chats.ts";
import { type Store, useStore } from "../state/store.ts";
import type { Settings } from "../state/types.ts";
import { Composer } from "./composer.tsx";
import { Icon } from "./icons.tsx";
import { KeyDialog, type KeyQuestion } from "./key.tsx";
import { Monitor } from "./monitor.tsx";
import { SettingsDialog } from "./settings.tsx";
import { Sidebar } from "./sidebar.tsx";
import { Thread } from "./thread.tsx";

const RETRY_MS = 2000;
const WIDE = "(min-width: 1100px)";

export interface AppProps {
  client: Client;
  chats: Chats;
  settings: Store<Settings>;
  keyQuestion: Store<KeyQuestion | null>;
}

export function App({ client, chats, settings: settingsStore, keyQuestion }: AppProps) {
  const state = useStore(chats.store);
  const settings = useStore(settingsStore);
  const question = useStore(keyQuestion);
  const [menu, setMenu] = useState(false);
  const [monitor, setMonitor] = useState(() => matchMedia(WIDE).matches);
  const [showSettings, setShowSettings] = useState(false);
  const { model, problem, retry } = useModel(client);
  useEffect(() => {
    const wide = matchMedia(WIDE);
    const close = () => wide.matches || setMonitor(false); // it would cover the conversation
    wide.addEventListener("change", close);
    return () => wide.removeEventListener("change", close);
  }, []);
  const conversation = chats.current;
  const busy = conversation !== null && conversation.id in state.running;

  useEscape(() => {
    if (menu) setMenu(false);
    else if (chats.current) chats.stop(chats.current.id);
  });

  return (
    <div class={`app${menu ? " menu-open" : ""}${monitor ? " monitor-open" : ""}`}>
      <a class="skip" href="#message">
        Skip to the message box
      </a>
      <Sidebar chats={chats} state={state} onPick={() => setMenu(false)} />
      {menu && <button type="button" class="shade" aria-label="Close the list" onClick={() => setMenu(false)} />}
      <main>
        <header class="top">
          <button
            type="button"
            class="quiet only-narrow"
            aria-label="Conversations"
            aria-expanded={menu}
            aria-controls="conversations"
            onClick={() => setMenu(!menu)}
          >
            <Icon name="menu" />
          </button>
          <h1>{model?.id ?? "civetta"}</h1>
          {model && <span class="hint model">{describe(model)}</span>}
          <span class="grow" />
          <button
            type="button"
            class="quiet"
            aria-label="Monitor"
            title="Monitor"
            aria-pressed={monitor}
            onClick={() => setMonitor(!monitor)}
          >
            <Icon name="monitor" />
          </button>
          <button type="button" class="quiet" aria-label="Settings" title="Settings" onClick={() => setShowSettings(true)}>
            <Icon name="settings" />
          </button>
        </header>
        {problem && (
          <p class="banner" role="alert">
            {problem}{" "}
            <button type="button" onClick={retry}>
              Try again
            </button>
          </p>
        )}
        {conversation ? (
          <Thread chats={chats} state={state} conversation={conversation} />
        ) : (
          <Welcome pictures={model?.pictures ?? false} onPick={(text) => void chats.send(text, [])} />
        )}
        <div id="message">
          <Composer
            busy={busy}
            pictures={model?.pictures ?? true}
            focusKey={state.currentId ?? ""}
            onSend={(text, pictures) => void chats.send(text, pictures)}
            onStop={() => conversation && chats.stop(conversation.id)}
          />
        </div>
      </main>
      {monitor && <Monitor client={client} onClose={() => setMonitor(false)} />}
      <p class="offscreen" role="status">
        {state.announcement}
      </p>
      {showSettings && (
        <SettingsDialog
          settings={settings}
          hasKey={client.key !== ""}
          onChange={(changed) => settingsStore.set(changed)}
          onForgetKey={() => {
            client.key = "";
            setShowSettings(false);
          }}
          onClose={() => setShowSettings(false)}
        />
      )}
      {question && <KeyDialog question={question} />}
    </div>
  );
}

const EXAMPLES = [
  "What is 17+25?",
  "Write a short story about a fox and a lamp.",
  "What is a lighthouse?",
];

/** As the page itself names it: with the version that lets the browser keep it. */
const ICON = document.querySelector<HTMLLinkElement>("link[rel=icon]")?.href;

function Welcome({ pictures, onPick }: { pictures: boolean; onPick: (text: string) => void }) {
  return (
    <div class="welcome">
      <img src={ICON} alt="" width="72" height="72" />
      <p>Ask something.{pictures && " Pictures can be pasted, dropped or picked."}</p>
      <div class="examples">
        {EXAMPLES.map((text) => (
          <button type="button" key={text} onClick={() => onPick(text)}>
            {text}
          </button>
        ))}
      </div>
    </div>
  );
}

/** The model that is served; asks again by itself while it loads. */
function useModel(client: Client) {
  const [model, setModel] = useState<ModelCard | null>(null);
  const [problem, setProblem] = useState("");
  const [attempt, setAttempt] = useState(0);
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    client.model().then(
      (card) => {
        setModel(card);
        setProblem("");
        document.title = `${card.id} · civetta`;
      },
      (error: unknown) => {
        setProblem(error instanceof ServerError ? error.message : "The server cannot be reached.");
        const refused = error instanceof ServerError && error.status !== 503;
        if (!refused) timer = setTimeout(() => setAttempt((count) => count + 1), RETRY_MS);
      },
    );
    return () => clearTimeout(timer);
  }, [client, attempt]);
  return { model, problem, retry: () => setAttempt((count) => count + 1) };
}

function describe({ contextTokens, format, device }: ModelCard): string {
  const context = contextTokens === null ? null : `${contextTokens.toLocaleString("en")} tokens of context`;
  return [format, device, context].filter((part) => part !== null).join(" · ");
}

function useEscape(onEscape: () => void): void {
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) onEscape();
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  });
}
