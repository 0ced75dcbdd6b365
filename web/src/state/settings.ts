/** Settings in localStorage. What is there is checked: another version, or a person, may have written it. */

import { DEFAULTS, type Settings, THEMES, THINKING } from "./types.ts";

const NAME = "civetta-settings";

export function loadSettings(storage: Storage | null): Settings {
  try {
    return checked(JSON.parse(storage?.getItem(NAME) ?? "{}"));
  } catch {
    return DEFAULTS;
  }
}

export function saveSettings(storage: Storage | null, settings: Settings): void {
  try {
    storage?.setItem(NAME, JSON.stringify(settings));
  } catch {
    // Storage that is full or forbidden: the settings hold until the page is left.
  }
}

/** The settings in `value`, each one that is no valid value replaced by its default. */
export function checked(value: unknown): Settings {
  const given = (typeof value === "object" && value !== null ? value : {}) as Record<string, unknown>;
  return {
    temperature: within(given.temperature, 0, 2),
    topP: within(given.topP, 0, 1),
    maxTokens: wholeFrom1(given.maxTokens),
    thinking: oneOf(given.thinking, THINKING) ?? DEFAULTS.thinking,
    system: typeof given.system === "string" ? given.system : DEFAULTS.system,
    theme: oneOf(given.theme, THEMES) ?? DEFAULTS.theme,
  };
}

function within(value: unknown, low: number, high: number): number | null {
  return typeof value === "number" && value >= low && value <= high ? value : null;
}

function wholeFrom1(value: unknown): number | null {
  return typeof value === "number" && Number.isInteger(value) && value >= 1 ? value : null;
}

function oneOf<T extends string>(value: unknown, choices: readonly T[]): T | null {
  return choices.find((choice) => choice === value) ?? null;
}
