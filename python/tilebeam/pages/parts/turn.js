// A message of a conversation as the page shows it.
const Turn = (() => {
  "use strict";
  const { element, candidate, voteRows } = client;

  function button(name, label, act) {
    const made = element("button", "quiet " + name, label);
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  }

  // Without the clipboard, which plain HTTP from another machine has not, as one would by hand.
  async function copy(text) {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(text);
      return;
    }
    const area = element("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }

  return class Turn {
    constructor(message) {
      this.message = message;
      this.said = element("div", message.role === "user" ? "said" : "rich said");
      this.thoughts = element("details", "thoughts", element("summary", "", "Thoughts"), element("pre", "text"));
      this.votes = element("aside", "votes");
      this.votes.setAttribute("aria-label", "Candidates and votes");
      this.note = element("span", "note told");
      this.foot = element("div", "foot", this.note);
      const who = element("h2", "unseen", message.role === "user" ? "You" : "Answer");
      this.root = element("section", "turn " + message.role, who, this.thoughts, this.said, this.votes, this.foot);
      this.rows = []; // of candidates
      this.show();
    }

    // What can be done with it once it stands still.
    offer(actions) {
      const copying = button("copy", "Copy", async () => {
        await copy(this.message.content);
        copying.textContent = "Copied";
      });
      this.foot.append(copying, ...Object.entries(actions).map(([label, act]) => button(label.toLowerCase(), label, act)));
    }

    show() {
      const { role, content, thoughts, note, search } = this.message;
      if (role === "user") this.said.textContent = content;
      else rich.fill(this.said, content);
      this.thoughts.hidden = !thoughts;
      this.thoughts.lastChild.textContent = thoughts || "";
      this.note.textContent = note || "";
      this.votes.hidden = !search;
      this.root.classList.toggle("voted", Boolean(search));
      if (search) this.search(search);
    }

    search({ budget, candidates, votes, answer, best, round }) {
      if (!this.list) {
        this.state = element("p", "note");
        this.tally = element("tbody");
        this.list = element("div");
        this.votes.append(this.state, element("table", "", this.tally), this.list);
        rich.upgradeOpened(this.list);
      }
      let state = candidates.length + " of " + budget + " answers";
      if (round && best === undefined) state += ", round " + round;
      if (answer === null) state += "; none of them has an answer to vote on";
      this.state.textContent = state;
      const answers = candidates.map((one) => one.answer).filter((one) => typeof one === "string");
      this.tally.replaceChildren(...voteRows(votes || {}, answers));
      for (const one of candidates.slice(this.rows.length)) {
        const label = typeof one.answer === "string" ? one.answer.slice(0, 40) : one.fate === "cut" ? "cut" : "";
        const row = candidate(one.text, element("span", "tag", "#" + one.index + (label && " · " + label)));
        this.rows.push(row);
        this.list.append(row);
      }
      const chosen = this.rows[candidates.findIndex((one) => one.index === best)];
      if (!chosen) return;
      chosen.classList.add("best");
      this.list.prepend(chosen);
    }
  };
})();
