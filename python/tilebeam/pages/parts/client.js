// What the chat is made of, and answers as streams.
const client = (() => {
  "use strict";
  const SHOWN = 160; // characters of a candidate in its row
  const at = new Proxy({}, { get: (_, id) => document.getElementById(id) }); // elements

  function element(tag, name, ...content) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.append(...content);
    return made;
  }

  function bar(share) {
    const svg = "http://www.w3.org/2000/svg";
    const made = document.createElementNS(svg, "svg");
    made.setAttribute("viewBox", "0 0 100 8");
    made.setAttribute("preserveAspectRatio", "none");
    made.setAttribute("aria-hidden", "true");
    for (const [name, width] of [["back", 100], ["front", 100 * share]]) {
      const rect = document.createElementNS(svg, "rect");
      rect.setAttribute("class", name);
      rect.setAttribute("width", width);
      rect.setAttribute("height", 8);
      made.append(rect);
    }
    return made;
  }

  // A candidate that opens: its beginning in a line, then all of it.
  function candidate(text, ...before) {
    const flat = text.slice(0, 4 * SHOWN).replace(/\s+/g, " ").trim();
    const preview = flat.length > SHOWN ? flat.slice(0, SHOWN - 1) + "…" : flat || "(empty)";
    const details = element("details", "", element("summary", "", ...before, element("span", "preview", preview)));
    details.append(element("pre", "text", text || "(empty)"));
    return details;
  }

  // Rows of a table of votes: answer, candidates, a bar, share; the heaviest first.
  function voteRows(votes, answers) {
    const total = Object.values(votes).reduce((sum, weight) => sum + weight, 0) || 1;
    const counts = new Map();
    for (const answer of answers) counts.set(answer, (counts.get(answer) || 0) + 1);
    // An object lists keys that are whole numbers first: the order is the weights'.
    const sorted = Object.entries(votes).sort((a, b) => b[1] - a[1]);
    return sorted.map(([answer, weight], i) => {
      const name = element("th", "", answer.slice(0, 200));
      name.scope = "row";
      const row = element("tr", i ? "" : "best", name, element("td", "n", String(counts.get(answer) || "")));
      row.append(element("td", "bar", bar(weight / total)));
      row.append(element("td", "n", ((100 * weight) / total).toFixed(1) + " %"));
      return row;
    });
  }

  async function refusal(answer) {
    try {
      return (await answer.json()).error.message;
    } catch {
      return "The server answered " + answer.status + ".";
    }
  }

  function headers() {
    return { "content-type": "application/json", ...(at.key?.value && { authorization: "Bearer " + at.key.value }) };
  }

  // Which models there are is told to those with a key only.
  at.key?.addEventListener("change", async () => {
    const answer = await fetch("/v1/models", { headers: headers() });
    const models = answer.ok ? (await answer.json()).data : [];
    at.model.replaceChildren(...models.map((model) => new Option(model.id)));
    at.model.closest(".field").hidden = models.length < 2;
  });

  // Yield the chunks of an answer. Error: what the server says is wrong. AbortError: the signal came.
  async function* stream(path, body, signal) {
    const sent = { ...body, stream: true, stream_options: { include_usage: true } };
    const answer = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(sent), signal });
    if (!answer.ok) throw new Error(await refusal(answer));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (text + value).split("\n");
      text = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const chunk = JSON.parse(line.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        yield chunk;
      }
    }
  }

  return { at, element, candidate, voteRows, stream };
})();
