/** Puts the page together. */

import { render } from "preact";
import { Client } from "./server/client.ts";
import { openArchive } from "./state/archive.ts";
import { Chats } from "./state/chats.ts";
import { loadSettings, saveSettings } from "./state/settings.ts";
import { Store } from "./state/store.ts";
import type { Settings } from "./state/types.ts";
import { App } from "./view/app.tsx";
import type { KeyQuestion } from "./view/key.tsx";

/** The storage, or null where the browser forbids it. */
function allowed(storage: () => Storage): Storage | null {
  try {
    return storage();
  } catch {
    return null;
  }
}

function dress({ theme }: Settings): void {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

const kept = allowed(() => localStorage);
const settings = new Store(loadSettings(kept));
const keyQuestion = new Store<KeyQuestion | null>(null);

function askKey(wrong: boolean): Promise<string | null> {
  return new Promise((resolve) => {
    const answer = (key: string | null) => {
      keyQuestion.set(null);
      resolve(key);
    };
    keyQuestion.set({ wrong, answer });
  });
}

// Relative to the page, so that it works below a path of a reverse proxy.
const client = new Client(new URL(".", document.baseURI), askKey, allowed(() => sessionStorage));
const chats = new Chats(client, await openArchive(), () => settings.value);

dress(settings.value);
settings.subscribe(() => {
  dress(settings.value);
  saveSettings(kept, settings.value);
});
addEventListener("pagehide", () => chats.stopAll());
await chats.load();
render(
  <App client={client} chats={chats} settings={settings} keyQuestion={keyQuestion} />,
  document.getElementById("app")!,
);
