// Asks the server for a search as a stream and shows what comes: candidates, rounds, votes, the answer.
(() => {
  "use strict";
  const { at, element, shown, candidate, voteRows } = client;
  let search = null; // the one that runs, or the last one
  let saved = null; // address of its page

  // --- the form ---------------------------------------------------------------------------------------------------

  function chooseMethod() {
    for (const field of document.querySelectorAll("[data-methods]")) {
      field.hidden = !field.dataset.methods.split(" ").includes(at.method.value);
    }
  }

  // The value of a number's field; undefined where it is empty or belongs to another method.
  function given(name) {
    const control = at[name];
    if (control.closest(".field").hidden || control.value === "") return undefined;
    return control.type === "number" ? Number(control.value) : control.value;
  }

  function request() {
    const body = {};
    if (at.model?.value) body.model = given("model");
    if (at.plain.checked) body.prompt = at.question.value;
    else body.messages = [{ role: "user", content: at.question.value }];
    for (const name of ["max_tokens", "temperature", "seed"]) body[name] = given(name);
    body.search = { method: at.method.value, candidates: true, page: true };
    for (const name of ["budget", "extract", "beam_width", "max_steps"]) body.search[name] = given(name);
    return body;
  }

  // --- a search ---------------------------------------------------------------------------------------------------

  class Search {
    constructor(body) {
      this.body = body;
      this.stopper = new AbortController();
      this.began = performance.now();
      this.rows = new Map();
      this.rounds = new Map();
      this.count = 0;
      this.tokens = 0;
      this.answers = new Map(); // of candidates
      this.result = null; // the last choice
      this.usage = null;
    }

    async run() {
      const path = this.body.messages ? "/v1/chat/completions" : "/v1/completions";
      for await (const chunk of client.stream(path, this.body, this.stopper.signal)) this.take(chunk);
      if (!this.result) throw new Error("The stream ended before the answer came.");
    }

    take(chunk) {
      if (chunk.usage) this.usage = chunk.usage;
      for (const choice of chunk.choices) {
        const found = choice.search;
        if (!found) continue;
        if (found.object === "tilebeam.search") this.result = choice;
        else if (found.event === "step") this.step(found);
        else if (found.event === "candidate") this.candidate(found);
        else this.rated(found);
        if (found.votes && found.object !== "tilebeam.search") this.vote(found.votes);
      }
      this.tell();
    }

    candidate(event) {
      const number = element("th", "n", String(event.index));
      number.scope = "row";
      const row = element("tr", "", number, element("td", "n", shown(event.score)));
      row.append(element("td", "n wide", event.tokens.toLocaleString("en")), element("td", "wide", event.fate));
      row.append(element("td", "t", candidate(event.text)));
      this.rows.set(event.index, row);
      this.count += 1;
      this.tokens += event.tokens;
      if (event.answer !== undefined) this.answers.set(event.index, event.answer);
      at["candidates-rows"].append(row);
      at.candidates.hidden = false;
    }

    rated(event) {
      const row = this.rows.get(event.index);
      if (row) row.children[1].textContent = shown(event.score);
    }

    step(event) {
      let round = this.rounds.get(event.round);
      if (!round) {
        const row = element("tr", "", ...["n", "n", "n", "n", "n"].map((name) => element("td", name)));
        round = { row, drawn: 0, kept: 0, dropped: 0, best: -Infinity };
        this.rounds.set(event.round, round);
        at["rounds-rows"].append(row);
        at.rounds.hidden = false;
      }
      round.drawn += 1;
      if (event.fate === "dropped") round.dropped += 1;
      else round.kept += 1;
      if (typeof event.score === "number") round.best = Math.max(round.best, event.score);
      const figures = [event.round, round.drawn, round.kept, round.dropped];
      figures.push(Number.isFinite(round.best) ? round.best.toFixed(3) : "");
      figures.forEach((figure, i) => (round.row.children[i].textContent = figure));
    }

    vote(votes) {
      const rows = voteRows(votes, this.answers.values());
      at["votes-rows"].replaceChildren(...rows);
      at.votes.hidden = !rows.length;
    }

    tell() {
      const seconds = ((performance.now() - this.began) / 1000).toFixed(1);
      const sampled = this.usage ? this.usage.completion_tokens : this.tokens;
      const drawn = this.count + (this.count === 1 ? " candidate" : " candidates");
      const budget = " (budget " + this.body.search.budget + "), ";
      at.state.textContent = drawn + budget + sampled.toLocaleString("en") + " tokens, " + seconds + " s";
    }

    finish() {
      const report = this.result.search;
      const best = report.candidates[report.best_index];
      const row = this.rows.get(report.best_index);
      if (row) {
        row.className = "best";
        row.querySelector("summary").prepend(element("span", "tag best", "chosen"));
        at["candidates-rows"].prepend(row);
      }
      report.scores.forEach((score, index) => this.rated({ index, score }));
      if (report.votes) this.vote(report.votes);
      const votes = "answer" in report;
      at.answer.hidden = !votes;
      at.answer.textContent = report.answer === null ? "No candidate has an answer." : report.answer;
      at.text.textContent = best.text || "(empty)";
      rich.upgrade(at.text);
      let why = "Candidate " + report.best_index + ", score " + shown(report.scores[report.best_index]);
      if (votes) {
        const same = report.answers.filter((answer) => answer !== null && answer === report.answer).length;
        why = same + " of " + report.candidates.length + " candidates; shown is candidate " + report.best_index;
        if (report.settled) why += "; the vote was settled before the budget was spent";
      }
      at.why.textContent = why + ".";
      at.chosen.hidden = false;
      at.news.textContent = votes && report.answer !== null ? "Answer: " + report.answer + ". " + why : "Done. " + why;
    }

    // The page of this search, made by the server.
    page() {
      return new Blob([this.result.search.page], { type: "text/html" });
    }
  }

  function clear() {
    for (const rows of ["votes-rows", "rounds-rows", "candidates-rows"]) at[rows].replaceChildren();
    for (const part of ["votes", "rounds", "candidates", "chosen", "save"]) at[part].hidden = true;
    for (const part of ["wrong", "news", "state"]) at[part].textContent = "";
    at.outcome.hidden = false;
    if (saved) URL.revokeObjectURL(saved);
    saved = null;
  }

  async function ask(event) {
    event.preventDefault();
    clear();
    search = new Search(request());
    at.go.disabled = true;
    at.stop.disabled = false;
    at.news.textContent = "Searching.";
    const clock = setInterval(() => search.tell(), 100);
    search.tell();
    try {
      await search.run();
      search.finish();
    } catch (error) {
      if (error.name === "AbortError") at.news.textContent = "Stopped.";
      else at.wrong.textContent = error.message;
      if (error.name === "AbortError") at.state.textContent += ", stopped";
    } finally {
      clearInterval(clock);
      at.go.disabled = false;
      at.stop.disabled = true;
    }
  }

  function openPage() {
    if (!saved) saved = URL.createObjectURL(search.page());
    at.save.href = saved;
    at.save.hidden = false;
    window.open(saved, "_blank");
  }

  at.ask.addEventListener("submit", ask);
  at.stop.addEventListener("click", () => search.stopper.abort());
  at.open.addEventListener("click", openPage);
  at.method.addEventListener("change", chooseMethod);
  at.question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !at.go.disabled) at.ask.requestSubmit();
  });
  rich.upgradeOpened(at.candidates);
  chooseMethod();
})();
