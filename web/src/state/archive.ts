/** Conversations kept in this browser: an IndexedDB store of one record each, or nothing. */

import type { Conversation } from "./types.ts";

const STORE = "conversations";

export interface Archive {
  all(): Promise<Conversation[]>;
  put(conversation: Conversation): Promise<void>;
  remove(id: string): Promise<void>;
}

/** The browser's database; where it is forbidden (private windows), an archive that keeps nothing. */
export async function openArchive(): Promise<Archive> {
  try {
    return new Database(await opened());
  } catch {
    return { all: async () => [], put: async () => undefined, remove: async () => undefined };
  }
}

class Database implements Archive {
  constructor(private readonly db: IDBDatabase) {}

  async all(): Promise<Conversation[]> {
    const found = await settled<Conversation[]>(this.store("readonly").getAll());
    return found.sort((a, b) => b.updatedMs - a.updatedMs);
  }

  async put(conversation: Conversation): Promise<void> {
    await settled(this.store("readwrite").put(conversation));
  }

  async remove(id: string): Promise<void> {
    await settled(this.store("readwrite").delete(id));
  }

  private store(mode: IDBTransactionMode): IDBObjectStore {
    return this.db.transaction(STORE, mode).objectStore(STORE);
  }
}

function opened(): Promise<IDBDatabase> {
  const request = indexedDB.open("civetta", 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  return settled(request);
}

function settled<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("the browser's database failed"));
  });
}
