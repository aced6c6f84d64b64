// The conversation: asks the server, shows what it streams, keeps all in the browser.
(() => {
  "use strict";
  const { at, element } = client;
  const KEPT = ["answers", "model", "judge", "system", "temperature", "max_tokens"].filter((name) => at[name]);
  const PACE = 60; // milliseconds between two looks at an answer that grows, or more if looking takes long
  const small = matchMedia("(max-width: 60rem)");
  let talk = conversations.all()[0] || conversations.create();
  let running = null; // AbortController of the answer that comes
  let editing = -1; // which message the next one replaces
  const pages = new WeakMap(); // of searches, by the message that they answer with: too large to be kept

  // --- what is asked ----------------------------------------------------------------------------------------------

  function request(messages) {
    const sent = messages.map(({ role, content }) => ({ role, content }));
    if (at.system.value.trim()) sent.unshift({ role: "system", content: at.system.value });
    const body = { messages: sent };
    if (at.model?.value) body.model = at.model.value;
    for (const name of ["temperature", "max_tokens"]) if (at[name].value) body[name] = Number(at[name].value);
    const budget = Number(at.answers.value);
    if (budget > 1) {
      const vote = [...at.judge.options].some(({ value }) => value === "tir") ? "tir" : "vote last-number";
      const usual = /\d/.test(messages[messages.length - 1].content) ? vote : "best-of-n";
      const [method, extract] = (at.judge.value || usual).split(" ");
      body.search = { method, extract, budget, candidates: true, page: true };
    }
    return body;
  }

  // An answer of a search comes as it was drawn.
  function parted(text) {
    const found = /^\s*<think>([^]*?)<\/think>\s*/.exec(text);
    return found ? { thoughts: found[1].trim(), content: text.slice(found[0].length) } : { content: text };
  }

  function take(message, choice) {
    const found = choice.search;
    if (found && found.object === "tilebeam.search") {
      Object.assign(message.search, { votes: found.votes, answer: found.answer, best: found.best_index });
      pages.set(message, found.page);
    } else if (found) {
      if (found.event === "candidate") message.search.candidates.push(found);
      if (found.votes) message.search.votes = found.votes;
      if (found.event === "step") message.search.round = found.round;
    }
    message.content += choice.delta.content || "";
    if (choice.delta.reasoning_content) message.thoughts = (message.thoughts || "") + choice.delta.reasoning_content;
    if (found && choice.delta.content) Object.assign(message, parted(message.content));
    if (choice.finish_reason === "length") message.cut = true;
  }

  function cost(message, usage, began) {
    const seconds = (performance.now() - began) / 1000;
    const tokens = usage ? usage.completion_tokens : 0;
    const parts = [];
    if (tokens) parts.push(tokens.toLocaleString("en") + (tokens === 1 ? " token" : " tokens"));
    // The time of one answer begins with its first token; that of a search, with the question.
    const timed = message.search ? tokens : tokens - 1;
    if (timed > 0 && seconds) parts.push((timed / seconds).toFixed(1) + " tokens/s");
    if (message.cut) parts.push("cut: a limit of tokens was reached");
    return parts.join(", ");
  }

  // --- an answer --------------------------------------------------------------------------------------------------

  async function answer() {
    const asked = talk;
    const body = request(asked.messages);
    const message = { role: "assistant", content: "" };
    if (body.search) message.search = { budget: body.search.budget, candidates: [] };
    keep(asked);
    asked.messages.push(message);
    show();
    running = new AbortController();
    at.wrong.textContent = "";
    at.news.textContent = "Answering.";
    waits(true);
    const turn = new Turn(message);
    turn.root.setAttribute("aria-busy", "true");
    at.log.lastElementChild.replaceWith(turn.root);
    end();
    let usage = null;
    let began = performance.now();
    let timer = 0;
    let pace = PACE;
    const look = (draw) => {
      const start = performance.now();
      const follows = innerHeight + scrollY > document.documentElement.scrollHeight - 80;
      draw();
      if (follows && !message.search) end(); // a search's answer comes whole, and is read from its beginning
      pace = Math.max(PACE, 5 * (performance.now() - start));
      timer = 0;
    };
    try {
      for await (const chunk of client.stream("/v1/chat/completions", body, running.signal)) {
        usage = chunk.usage || usage;
        for (const choice of chunk.choices) {
          if (!body.search && !message.content && !message.thoughts) began = performance.now();
          take(message, choice);
        }
        timer ||= setTimeout(look, pace, () => turn.show());
      }
      message.note = cost(message, usage, began);
    } catch (error) {
      message.note = "stopped";
      if (error.name !== "AbortError") at.wrong.textContent = error.message;
    }
    clearTimeout(timer);
    if (!message.content && !message.thoughts && !message.search?.candidates.length) {
      asked.messages.splice(asked.messages.indexOf(message), 1);
    }
    running = null;
    waits(false);
    keep(asked);
    if (asked === talk) look(show);
    at.news.textContent = message.note === "stopped" ? "Stopped." : "Answer: " + message.content;
  }

  function end() {
    scrollTo(0, document.documentElement.scrollHeight);
  }

  function waits(does) {
    at.go.hidden = does;
    at.stop.hidden = !does;
  }

  function send(event) {
    event.preventDefault();
    const content = at.question.value.trim();
    if (!content || running) return;
    if (editing >= 0) talk.messages.length = editing;
    editing = -1;
    at.question.value = "";
    talk.messages.push({ role: "user", content });
    answer();
  }

  function regenerate() {
    if (running) return;
    if (talk.messages.at(-1).role === "assistant") talk.messages.pop();
    answer();
  }

  function edit(index) {
    editing = index;
    at.question.value = talk.messages[index].content;
    at.question.focus();
    at.news.textContent = "Your last question is in the field; Escape leaves it as it was.";
    at.log.children[index].classList.add("edited");
  }

  // --- the conversation, and the others ---------------------------------------------------------------------------

  function show() {
    const last = talk.messages.findLastIndex((message) => message.role === "user");
    at.log.replaceChildren(...talk.messages.map((message, i) => {
      const turn = new Turn(message);
      const actions = {};
      if (i === last) actions.Edit = () => edit(i);
      if (pages.has(message)) actions.Details = () => openPage(pages.get(message));
      if (i === talk.messages.length - 1) actions[message.role === "user" ? "Answer" : "Regenerate"] = regenerate;
      turn.offer(actions);
      return turn.root;
    }));
    at.log.classList.toggle("empty", !talk.messages.length);
    at.export.disabled = !talk.messages.length;
    at.list.replaceChildren(...conversations.all().map((one) => {
      const open = element("button", "quiet open", conversations.title(one));
      const remove = element("button", "quiet", "×");
      open.type = remove.type = "button";
      if (one.id === talk.id) open.setAttribute("aria-current", "true");
      remove.setAttribute("aria-label", "Delete: " + conversations.title(one));
      open.addEventListener("click", () => change(one));
      remove.addEventListener("click", () => forget(one));
      return element("li", "", open, remove);
    }));
  }

  // The page of a search, made by the server: all candidates, the votes, the tree of steps.
  function openPage(page) {
    window.open(URL.createObjectURL(new Blob([page], { type: "text/html" })), "_blank");
  }

  function keep(one) {
    if (one.gone || conversations.save(one)) return;
    at.wrong.textContent = "This browser cannot keep the conversation: its storage is full or turned off.";
  }

  function change(one) {
    running?.abort();
    if (editing >= 0) at.question.value = "";
    editing = -1;
    talk = one;
    at.wrong.textContent = "";
    show();
    if (small.matches) at.history.open = false;
    end();
    at.question.focus();
  }

  function forget(one) {
    if (!confirm("Delete this conversation?\n" + conversations.title(one))) return;
    conversations.remove(one);
    if (one.id !== talk.id) return show();
    talk.gone = true; // an answer that still comes does not bring it back
    return change(conversations.create());
  }

  function save() {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(talk, null, 2)], { type: "application/json" }));
    link.download = "conversation.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  at.composer.addEventListener("submit", send);
  at.stop.addEventListener("click", () => running?.abort());
  at.new.addEventListener("click", () => change(conversations.create()));
  at.export.addEventListener("click", save);
  at.question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape" && editing >= 0) change(talk);
  });
  for (const name of KEPT) {
    const value = conversations.settings()[name];
    const known = !at[name].options || [...at[name].options].some((option) => option.value === value);
    if (value !== undefined && known) at[name].value = value;
  }
  at.composer.addEventListener("change", () => {
    conversations.keepSettings(Object.fromEntries(KEPT.map((name) => [name, at[name].value])));
  });
  at.history.open = !small.matches;
  show();
  end();
  at.question.focus();
})();
