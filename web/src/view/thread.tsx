/** The messages, kept at the newest one while the person does not scroll away from it. */

import { useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Chats, ChatsState } from "../state/chats.ts";
import type { Conversation } from "../state/types.ts";
import { Icon } from "./icons.tsx";
import { MessageView } from "./message.tsx";

const NEAR_PX = 60;

export function Thread({ chats, state, conversation }: { chats: Chats; state: ChatsState; conversation: Conversation }) {
  const box = useRef<HTMLDivElement>(null);
  const [following, setFollowing] = useState(true);
  const progress = state.running[conversation.id];
  const count = conversation.messages.length;
  useLayoutEffect(() => setFollowing(true), [conversation.id, count]);
  useLayoutEffect(() => {
    const element = box.current;
    if (element && following) element.scrollTop = element.scrollHeight;
  }, [conversation, following]);
  const onScroll = () => {
    const element = box.current;
    if (element) setFollowing(element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_PX);
  };
  return (
    <div class="thread-frame">
      <div class="thread" ref={box} onScroll={onScroll} tabIndex={0} role="region" aria-label="Messages">
        <div class="column">
          {conversation.messages.map((message) => (
            <MessageView
              key={message.id}
              message={message}
              progress={progress}
              busy={progress !== undefined}
              onAgain={() => void chats.again(conversation.id, message.id)}
              onEdit={(text) => void chats.edit(conversation.id, message.id, text)}
            />
          ))}
        </div>
      </div>
      {!following && (
        <button type="button" class="to-end" aria-label="To the newest message" onClick={() => setFollowing(true)}>
          <Icon name="down" />
        </button>
      )}
    </div>
  );
}
