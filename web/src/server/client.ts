/** Requests to the server that this page came from, with the key and with its errors as words. */

/** An answer that was no success; `message` is the server's own sentence where it gave one. */
export class ServerError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
    this.name = "ServerError";
  }
}

export interface ModelCard {
  id: string;
  contextTokens: number | null;
  /** Of the network alone, as the file tells it; null where the server does not say. */
  parameters: number | null;
  format: string | null;
  device: string | null;
  /** Whether it looks at pictures; true where the server does not say. */
  pictures: boolean;
}

/** Asks the person for the key; resolves to null when they would rather not. */
export type AskKey = (wrong: boolean) => Promise<string | null>;

const KEY_NAME = "civetta-key";

export class Client {
  private asking: Promise<string | null> | null = null;

  constructor(
    private readonly base: URL,
    private readonly askKey: AskKey,
    private readonly storage: Storage | null,
  ) {}

  get key(): string {
    return this.storage?.getItem(KEY_NAME) ?? this.kept;
  }

  set key(key: string) {
    this.kept = key;
    if (key) this.storage?.setItem(KEY_NAME, key);
    else this.storage?.removeItem(KEY_NAME);
  }

  private kept = "";

  /**
   * One request, repeated after the person gave a key where the server wants one.
   *
   * Throws ServerError for any answer but a success; with `quiet` the person is not asked.
   */
  async request(path: string, init: RequestInit = {}, { quiet = false } = {}): Promise<Response> {
    for (;;) {
      const sent = this.key;
      const response = await this.send(path, init, sent);
      if (response.ok) return response;
      if (response.status !== 401 || quiet) throw await errorOf(response);
      if (this.key === sent && !(await this.newKey(sent !== ""))) throw await errorOf(response);
    }
  }

  /** The model that is served. */
  async model(): Promise<ModelCard> {
    const list = (await (await this.request("v1/models")).json()) as { data?: Record<string, unknown>[] };
    const entry = list.data?.[0] ?? {};
    const meta = (entry.meta ?? {}) as Record<string, unknown>;
    return {
      id: textOf(entry.id) ?? "model",
      contextTokens: numberOf(entry.context_length) ?? numberOf(entry.max_model_len),
      parameters: numberOf(meta.n_params),
      format: textOf(meta.format),
      device: textOf(meta.device),
      pictures: !Array.isArray(entry.modalities) || entry.modalities.includes("image"),
    };
  }

  /** Ends a request by the id it was answered with. One that has ended already is no error. */
  async abort(requestId: string): Promise<void> {
    const path = `v1/requests/${encodeURIComponent(requestId)}`;
    await this.request(path, { method: "DELETE", keepalive: true }, { quiet: true }).catch(() => undefined);
  }

  private send(path: string, init: RequestInit, key: string): Promise<Response> {
    const headers = new Headers(init.headers);
    if (key) headers.set("Authorization", `Bearer ${key}`);
    return fetch(new URL(path, this.base), { ...init, headers, cache: "no-store", credentials: "same-origin" });
  }

  /** One question at a time, whoever needs the answer. */
  private async newKey(wrong: boolean): Promise<boolean> {
    this.asking ??= this.askKey(wrong).finally(() => (this.asking = null));
    const key = await this.asking;
    if (key) this.key = key;
    return Boolean(key);
  }
}

async function errorOf(response: Response): Promise<ServerError> {
  const body = (await response.json().catch(() => null)) as { error?: { message?: unknown }; status?: unknown } | null;
  const said = textOf(body?.error?.message) ?? textOf(body?.status);
  return new ServerError(said ?? `The server answered ${response.status}.`, response.status);
}

function textOf(value: unknown): string | null {
  return typeof value === "string" && value ? value : null;
}

function numberOf(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
