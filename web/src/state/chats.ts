/** The conversations, the replies under way, and what can be done with them. */

import type { Client } from "../server/client.ts";
import { ServerError } from "../server/client.ts";
import { type ReplyPart, chatBody, streamReply } from "../server/reply.ts";
import type { Archive } from "./archive.ts";
import { Store } from "./store.ts";
import { Throttle } from "./throttle.ts";
import type { Conversation, Message, Settings } from "./types.ts";

const FLUSH_MS = 33; // how often a stream is drawn
const SAVE_MS = 2000; // how often an unfinished reply is kept
const TITLE_CHARS = 60;

export interface ChatsState {
  conversations: Conversation[];
  /** null is a conversation that has no message yet. */
  currentId: string | null;
  /** Share of the prompt that was read, by conversation; present while a reply is under way. */
  running: Record<string, number>;
  /** For people who cannot see the page change. */
  announcement: string;
}

interface Run {
  controller: AbortController;
  requestId: string;
  startedMs: number;
}

export class Chats {
  readonly store = new Store<ChatsState>({ conversations: [], currentId: null, running: {}, announcement: "" });
  private readonly runs = new Map<string, Run>();

  constructor(
    private readonly client: Client,
    private readonly archive: Archive,
    private readonly settings: () => Settings,
  ) {}

  /** Reads what this browser kept. A reply that was under way when the page was left is marked stopped. */
  async load(): Promise<void> {
    const conversations = (await this.archive.all()).map(settledConversation);
    this.update({ conversations });
  }

  get current(): Conversation | null {
    const { conversations, currentId } = this.store.value;
    return conversations.find((conversation) => conversation.id === currentId) ?? null;
  }

  select(id: string | null): void {
    this.update({ currentId: id });
  }

  async remove(id: string): Promise<void> {
    this.stop(id);
    const { conversations, currentId } = this.store.value;
    this.update({
      conversations: conversations.filter((conversation) => conversation.id !== id),
      currentId: currentId === id ? null : currentId,
    });
    await this.archive.remove(id);
  }

  rename(id: string, title: string): void {
    if (title.trim()) this.keep(this.change(id, (conversation) => ({ ...conversation, title: title.trim() })));
  }

  /** Adds the person's message to the conversation that is open, and asks for the reply. */
  async send(text: string, pictures: string[]): Promise<void> {
    const conversation = this.current ?? this.begin(text);
    await this.reply(conversation.id, [...conversation.messages, userMessage(text, pictures)]);
  }

  /** Asks once more for the reply `messageId`; what came after it goes. */
  async again(conversationId: string, messageId: string): Promise<void> {
    const messages = this.find(conversationId)?.messages ?? [];
    const at = messages.findIndex((message) => message.id === messageId);
    if (at > 0) await this.reply(conversationId, messages.slice(0, at));
  }

  /** Replaces the person's message `messageId`; what came after it goes. */
  async edit(conversationId: string, messageId: string, text: string): Promise<void> {
    const messages = this.find(conversationId)?.messages ?? [];
    const at = messages.findIndex((message) => message.id === messageId);
    const old = messages[at];
    if (old) await this.reply(conversationId, [...messages.slice(0, at), userMessage(text, old.pictures)]);
  }

  /** Ends the reply under way: the connection is cut, and the server is told by the request's id. */
  stop(conversationId: string): void {
    const run = this.runs.get(conversationId);
    if (!run) return;
    run.controller.abort();
    if (run.requestId) void this.client.abort(run.requestId);
  }

  stopAll(): void {
    for (const id of this.runs.keys()) this.stop(id);
  }

  private begin(text: string): Conversation {
    const title = text.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARS) || "Picture";
    const conversation: Conversation = { id: newId(), title, updatedMs: Date.now(), messages: [] };
    const { conversations } = this.store.value;
    this.update({ conversations: [conversation, ...conversations], currentId: conversation.id });
    return conversation;
  }

  private async reply(id: string, asked: Message[]): Promise<void> {
    if (this.runs.has(id)) return;
    const run: Run = { controller: new AbortController(), requestId: "", startedMs: Date.now() };
    this.runs.set(id, run);
    const draft = new Draft(asked);
    this.show(id, draft, 0);
    this.announce("civetta is answering");
    try {
      await this.stream(id, run, draft);
    } catch (error) {
      draft.fail(error);
    } finally {
      this.runs.delete(id);
      this.show(id, draft, null);
      this.announce(draft.message.error || draft.message.text || "The reply ended without text");
      this.keep(this.find(id));
    }
  }

  private async stream(id: string, run: Run, draft: Draft): Promise<void> {
    const body = chatBody(draft.asked, this.settings());
    let progress = 0;
    const show = new Throttle(FLUSH_MS, () => this.show(id, draft, progress));
    const save = new Throttle(SAVE_MS, () => this.keep(this.find(id)));
    this.keep(this.find(id));
    try {
      for await (const part of streamReply(this.client, body, run.controller.signal)) {
        if (part.kind === "id") run.requestId = part.requestId;
        if (part.kind === "progress") progress = part.share;
        draft.take(part, Date.now() - run.startedMs);
        show.ask();
        save.ask();
      }
    } finally {
      show.cancel();
      save.cancel();
    }
  }

  private show(id: string, draft: Draft, progress: number | null): void {
    const { [id]: _, ...others } = this.store.value.running;
    const running = progress === null ? others : { ...others, [id]: progress };
    this.change(id, (conversation) => ({ ...conversation, updatedMs: Date.now(), messages: draft.messages }), { running });
  }

  private find(id: string): Conversation | null {
    return this.store.value.conversations.find((conversation) => conversation.id === id) ?? null;
  }

  private change(
    id: string,
    edit: (conversation: Conversation) => Conversation,
    more: Partial<ChatsState> = {},
  ): Conversation | null {
    const conversations = this.store.value.conversations.map((one) => (one.id === id ? edit(one) : one));
    this.update({ conversations, ...more });
    return this.find(id);
  }

  private keep(conversation: Conversation | null): void {
    if (conversation) void this.archive.put(conversation).catch(() => undefined); // full: it stays on the page
  }

  private announce(announcement: string): void {
    this.update({ announcement });
  }

  private update(change: Partial<ChatsState>): void {
    this.store.set({ ...this.store.value, ...change });
  }
}

/** The reply as it grows. */
class Draft {
  message: Message = { ...emptyMessage("assistant"), ending: "running" };

  constructor(readonly asked: Message[]) {}

  get messages(): Message[] {
    return [...this.asked, this.message];
  }

  take(part: ReplyPart, elapsedMs: number): void {
    const { message } = this;
    if (part.kind === "thought") {
      this.message = { ...message, thought: message.thought + part.text };
    } else if (part.kind === "text") {
      const thoughtMs = message.thought && message.thoughtMs === null ? elapsedMs : message.thoughtMs;
      this.message = { ...message, text: message.text + part.text, thoughtMs };
    } else if (part.kind === "call") {
      const calls = [...message.calls];
      calls[part.index] = `${calls[part.index] ?? part.name}${part.json}`;
      this.message = { ...message, calls };
    } else if (part.kind === "end") {
      const thoughtMs = message.thought ? (message.thoughtMs ?? elapsedMs) : null;
      const ending = part.reason === "length" ? "length" : "done";
      this.message = { ...message, ending, figures: part.figures, thoughtMs };
    }
  }

  fail(error: unknown): void {
    if (error instanceof DOMException && error.name === "AbortError") {
      this.message = { ...this.message, ending: "stopped" };
      return;
    }
    const said = error instanceof ServerError ? error.message : "The server cannot be reached.";
    this.message = { ...this.message, ending: "failed", error: said };
  }
}

function userMessage(text: string, pictures: string[]): Message {
  return { ...emptyMessage("user"), text, pictures };
}

function emptyMessage(role: Message["role"]): Message {
  return {
    id: newId(),
    role,
    text: "",
    thought: "",
    thoughtMs: null,
    pictures: [],
    calls: [],
    ending: "done",
    error: "",
    figures: null,
  };
}

function settledConversation(conversation: Conversation): Conversation {
  const messages = conversation.messages.map((message) =>
    message.ending === "running" ? { ...message, ending: "stopped" as const } : message,
  );
  return { ...conversation, messages };
}

/** randomUUID is missing where the page came over plain http. */
function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
