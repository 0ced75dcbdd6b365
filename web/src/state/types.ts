/** What the page remembers. */

import type { Figures } from "../server/reply.ts";

export type Ending = "running" | "done" | "length" | "stopped" | "failed";

export interface Message {
  id: string;
  role: "user" | "assistant";
  text: string;
  thought: string;
  /** How long the model thought, once the answer began. */
  thoughtMs: number | null;
  /** Data URLs. */
  pictures: string[];
  /** Tool calls that the model made though no tool was offered, as text. */
  calls: string[];
  ending: Ending;
  error: string;
  figures: Figures | null;
}

export interface Conversation {
  id: string;
  title: string;
  updatedMs: number;
  messages: Message[];
}

export const THINKING = ["default", "off", "on", "minimal", "low", "medium", "high", "xhigh", "max"] as const;
export type Thinking = (typeof THINKING)[number];
export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

/** null leaves a value to the server. */
export interface Settings {
  temperature: number | null;
  topP: number | null;
  maxTokens: number | null;
  thinking: Thinking;
  system: string;
  theme: Theme;
}

export const DEFAULTS: Settings = {
  temperature: null,
  topP: null,
  maxTokens: null,
  thinking: "default",
  system: "",
  theme: "auto",
};
