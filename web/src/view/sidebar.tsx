/** The conversations of this browser. */

import { useState } from "preact/hooks";
import type { Chats, ChatsState } from "../state/chats.ts";
import type { Conversation } from "../state/types.ts";
import { Icon } from "./icons.tsx";

export function Sidebar({ chats, state, onPick }: { chats: Chats; state: ChatsState; onPick: () => void }) {
  const pick = (id: string | null) => {
    chats.select(id);
    onPick();
  };
  return (
    <nav class="sidebar" id="conversations" aria-label="Conversations">
      <button type="button" class="new" onClick={() => pick(null)}>
        <Icon name="plus" /> New conversation
      </button>
      <ul>
        {state.conversations.map((conversation) => (
          <Entry
            key={conversation.id}
            conversation={conversation}
            current={conversation.id === state.currentId}
            running={conversation.id in state.running}
            onPick={() => pick(conversation.id)}
            onRename={(title) => chats.rename(conversation.id, title)}
            onRemove={() => void chats.remove(conversation.id)}
          />
        ))}
      </ul>
      <p class="hint">Kept in this browser only.</p>
    </nav>
  );
}

interface EntryProps {
  conversation: Conversation;
  current: boolean;
  running: boolean;
  onPick: () => void;
  onRename: (title: string) => void;
  onRemove: () => void;
}

function Entry({ conversation, current, running, onPick, onRename, onRemove }: EntryProps) {
  const [renaming, setRenaming] = useState(false);
  const { title } = conversation;
  if (renaming) {
    const finish = (name: string) => {
      setRenaming(false);
      onRename(name);
    };
    return (
      <li>
        <input
          autofocus
          aria-label="Name of the conversation"
          defaultValue={title}
          onBlur={(event) => finish(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter") finish(event.currentTarget.value);
            if (event.key === "Escape") setRenaming(false);
          }}
        />
      </li>
    );
  }
  const remove = () => {
    if (confirm(`Delete the conversation "${title}"?`)) onRemove();
  };
  return (
    <li class={current ? "current" : ""}>
      <button type="button" class="title" aria-current={current ? "true" : undefined} onClick={onPick}>
        {running && <span class="dots" role="img" aria-label="being answered" />}
        {title}
      </button>
      <button type="button" class="quiet" aria-label={`Rename ${title}`} title="Rename" onClick={() => setRenaming(true)}>
        <Icon name="edit" />
      </button>
      <button type="button" class="quiet" aria-label={`Delete ${title}`} title="Delete" onClick={remove}>
        <Icon name="remove" />
      </button>
    </li>
  );
}
