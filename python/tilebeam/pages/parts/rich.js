// Markdown and formulas out of what a model wrote. What it writes as HTML is shown as text; DOMPurify keeps what
// remains to a few elements without styles, and Temml makes formulas element by element. Nothing of it runs or loads.
const rich = (() => {
  "use strict";
  const FORMULAS = [
    /^\\\[([^]{1,9999}?)\\\]/,
    /^\$\$([^]{1,9999}?)\$\$/,
    /^\\\(([^]{1,9999}?)\\\)/,
    /^\$(?![\s$])((?:\\.|[^$\\\n]){1,999}?)(?<!\s)\$(?![\d$])/, // not the money of "$5 to $6"
    /^(\\boxed\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\}){1,999}\})/,
  ];
  const MARKED = /\\[[(]|\\boxed\{|\$[^$\n]+\$|\*\*\S[^*\n]*\*\*|^\s*```/m;
  const TAGS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" ");
  const rules = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "class", "start", "align"], ALLOW_DATA_ATTR: false };
  Object.assign(rules, { ALLOW_ARIA_ATTR: false, ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, RETURN_DOM_FRAGMENT: true });

  function escaped(text) {
    return text.replace(/[&<>"]/g, (c) => "&#" + c.charCodeAt(0) + ";");
  }

  function formula(src) {
    for (const [i, form] of FORMULAS.entries()) {
      const found = form.exec(src);
      if (found) return { type: "formula", raw: found[0], text: found[1].trim(), block: i < 2 };
    }
    return undefined;
  }

  const inline = {
    name: "formula",
    level: "inline",
    start: (src) => src.match(/\\[[(b]|\$/)?.index,
    tokenizer: formula,
    renderer: (token) => `<code class="tex${token.block ? " block" : ""}">${escaped(token.text)}</code>`,
  };
  // One that stands for itself, whose lines could be taken for lists and headings.
  const block = {
    name: "formulas",
    level: "block",
    start: (src) => src.match(/\n *(?:\\\[|\$\$)/)?.index,
    tokenizer(src) {
      const indent = /^ */.exec(src)[0];
      const found = formula(src.slice(indent.length));
      const rest = found && found.block ? /^[ \t]*(?:\n+|$)/.exec(src.slice(indent.length + found.raw.length)) : null;
      return rest ? { ...found, type: "formulas", raw: indent + found.raw + rest[0] } : undefined;
    },
    renderer: (token) => `<p>${inline.renderer(token)}</p>`,
  };
  const renderer = {
    html: (token) => escaped(token.text),
    image: (token) => `<a href="${escaped(token.href)}">${escaped(token.text || token.href)}</a>`,
    checkbox: (token) => (token.checked ? "☑ " : "☐ "),
  };
  const markdown = new marked.Marked({ breaks: true, extensions: [inline, block], renderer });

  // Fill an element.
  function fill(host, text) {
    try {
      host.replaceChildren(DOMPurify.sanitize(markdown.parse(text), rules));
    } catch {
      host.textContent = text; // nested deeper than the library follows
    }
    for (const link of host.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
    for (const code of host.querySelectorAll("code.tex")) {
      const made = document.createElement("span");
      const displayMode = code.classList.contains("block");
      try {
        temml.render(code.textContent, made, { displayMode, throwOnError: true, maxExpand: 500, maxSize: [50, 50] });
        made.className = displayMode ? "formula block" : "formula";
        code.replaceWith(made);
      } catch {
        // It stays as it was written.
      }
    }
  }

  // Show a text as what it means where it has any markup, with a button for how it was written.
  function upgrade(pre) {
    for (const old of pre.parentNode.querySelectorAll(":scope > .rich, :scope > .raw")) old.remove();
    pre.hidden = MARKED.test(pre.textContent);
    if (!pre.hidden) return;
    const view = document.createElement("div");
    const button = document.createElement("button");
    view.className = "rich";
    Object.assign(button, { className: "raw quiet", type: "button", textContent: "As written" });
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      view.hidden = !view.hidden;
      pre.hidden = !pre.hidden;
      button.setAttribute("aria-pressed", String(view.hidden));
    });
    fill(view, pre.textContent);
    pre.before(view);
    pre.after(button);
  }

  // The texts of candidates in a part of a page when they are opened.
  function upgradeOpened(part) {
    part.addEventListener("toggle", (event) => {
      for (const pre of event.target.open ? event.target.querySelectorAll("pre.text") : []) {
        if (!pre.dataset.seen) upgrade(pre);
        pre.dataset.seen = "1";
      }
    }, true);
  }

  return { fill, upgrade, upgradeOpened };
})();
