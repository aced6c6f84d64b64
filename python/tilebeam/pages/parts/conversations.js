// Conversations in the browser's storage, each under a key of its own: two windows do not undo each other's. One is
// { id, changed, messages: [{ role, content, .. }] }; of an answer also thoughts, note (what it cost) and search.
const conversations = (() => {
  "use strict";
  const PREFIX = "tilebeam.chat.";
  const SETTINGS = "tilebeam.settings";

  function read(key) {
    try {
      return JSON.parse(localStorage.getItem(key));
    } catch {
      return null;
    }
  }

  // Whether it was kept: the storage may be full, or forbidden.
  function write(key, value) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }

  // All of them, the last one that changed first.
  function all() {
    let keys = [];
    try {
      keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    } catch {
      // No storage: none.
    }
    return keys.map(read).filter((talk) => Array.isArray(talk?.messages)).sort((a, b) => b.changed - a.changed);
  }

  function title(talk) {
    const first = talk.messages.find((message) => message.role === "user");
    return first ? first.content.replace(/\s+/g, " ").trim().slice(0, 80) : "New conversation";
  }

  return {
    all,
    title,
    // Not crypto.randomUUID, which plain HTTP does not have.
    create: () => ({ id: Date.now().toString(36) + Math.random().toString(36).slice(2), changed: 0, messages: [] }),
    save: (talk) => write(PREFIX + talk.id, Object.assign(talk, { changed: Date.now() })),
    remove: (talk) => localStorage.removeItem(PREFIX + talk.id),
    settings: () => read(SETTINGS) ?? {},
    keepSettings: (values) => write(SETTINGS, values),
  };
})();
