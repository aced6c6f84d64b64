// The tree of steps: a row for each node that is in sight. Without this script the page has all but the tree.
// A node has p (its parent's number), t (text), s (score), b (the chosen one passes), n (what became of beams there).
(() => {
  "use strict";
  const FEW = 60; // a tree of so many steps is shown whole
  const results = JSON.parse(document.getElementById("data").textContent);

  function element(tag, name, text) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function shown(score) {
    return score === null || score === undefined ? "" : score.toFixed(3);
  }

  class Tree {
    constructor(host, nodes, candidatePrefix) {
      this.host = host;
      this.nodes = nodes;
      this.prefix = candidatePrefix;
      this.children = nodes.map(() => []);
      this.roots = [];
      nodes.forEach((node, i) => (node.p < 0 ? this.roots : this.children[node.p]).push(i));
      this.level = nodes.map((node) => node.p);
      nodes.forEach((node, i) => (this.level[i] = node.p < 0 ? 1 : this.level[node.p] + 1));
      this.inside = this.nodes.map(() => [0, 0]); // texts that end below a node: candidates, and those that were lost
      for (let i = nodes.length - 1; i >= 0; i--) {
        if (nodes[i].p < 0) continue;
        const above = this.inside[nodes[i].p];
        for (const [kind] of nodes[i].n || []) above[kind === "lost" ? 1 : 0] += 1;
        above[0] += this.inside[i][0];
        above[1] += this.inside[i][1];
      }
      this.rows = new Map(); // rows in sight, by the number of their node
      this.insert(this.roots, null);
      nodes.forEach((node, i) => {
        if (nodes.length <= FEW || node.b) this.expand(i);
      });
      this.active = null; // the row that the Tab key comes to; a closed branch never has it
      if (this.roots.length) this.activate(this.rows.get(this.roots[0]));
      host.addEventListener("keydown", (event) => this.key(event));
      host.addEventListener("click", (event) => this.click(event));
    }

    // Rows for sibling nodes, behind a row or at the beginning.
    insert(siblings, after) {
      const rows = siblings.map((i, at) => this.row(i, at + 1, siblings.length));
      if (after) after.after(...rows);
      else this.host.append(...rows);
    }

    row(i, position, count) {
      const node = this.nodes[i];
      const row = element("div", "step");
      const notes = node.n || [];
      if (node.b) row.classList.add("best");
      if (node.head) row.classList.add("head");
      if (notes.length && !this.children[i].length && notes.every((note) => note[0] === "lost")) row.classList.add("lost");
      row.setAttribute("role", "treeitem");
      row.setAttribute("aria-level", this.level[i]);
      row.setAttribute("aria-posinset", position);
      row.setAttribute("aria-setsize", count);
      row.setAttribute("aria-selected", "false");
      row.tabIndex = -1;
      row.dataset.node = i;
      row.style.setProperty("--depth", this.level[i] - 1);
      const twist = element("span", "twist", this.children[i].length ? "▸" : "");
      twist.setAttribute("aria-hidden", "true");
      const [kept, lost] = this.inside[i];
      const below = [kept ? kept + (kept === 1 ? " candidate" : " candidates") : "", lost ? lost + " lost" : ""];
      row.append(twist, element("span", "said", this.summary(node)));
      row.append(element("span", "inside", below.filter(Boolean).join(", ")), element("span", "score", shown(node.s)));
      if (this.children[i].length) row.setAttribute("aria-expanded", "false");
      if (notes.length) {
        const fates = element("span", "fates");
        for (const [kind, said, candidate] of notes) {
          const fate = element(candidate < 0 ? "span" : "a", "fate " + kind, said);
          if (candidate >= 0) {
            fate.href = "#" + this.prefix + candidate;
            fate.tabIndex = -1;
          }
          fates.append(fate);
        }
        row.append(fates);
      }
      this.rows.set(i, row);
      return row;
    }

    // A step's text in one line.
    summary(node) {
      return node.t.slice(0, 400).replace(/\s+/g, " ").trim() || "(empty)";
    }

    isOpen(i) {
      return this.rows.get(i).getAttribute("aria-expanded") === "true";
    }

    expand(i) {
      const row = this.rows.get(i);
      if (!row || !this.children[i].length || this.isOpen(i)) return;
      row.setAttribute("aria-expanded", "true");
      row.firstChild.textContent = "▾";
      this.insert(this.children[i], row);
    }

    collapse(i) {
      if (!this.children[i].length || !this.isOpen(i)) return;
      for (const child of this.children[i]) {
        this.collapse(child);
        this.rows.get(child).remove();
        this.rows.delete(child);
      }
      const row = this.rows.get(i);
      row.setAttribute("aria-expanded", "false");
      row.firstChild.textContent = "▸";
    }

    // A step in full, or in one line again.
    toggleText(i) {
      const row = this.rows.get(i);
      const open = row.classList.toggle("open");
      row.children[1].textContent = open ? this.nodes[i].t.replace(/\n$/, "") || "(empty)" : this.summary(this.nodes[i]);
    }

    // The Tab key comes to one row, and from there to its links.
    activate(row) {
      for (const [one, index] of [[this.active, -1], [row, 0]]) {
        if (one) for (const part of [one, ...one.querySelectorAll("a")]) part.tabIndex = index;
      }
      this.active = row;
    }

    focus(row) {
      if (this.active) this.active.setAttribute("aria-selected", "false");
      this.activate(row);
      row.setAttribute("aria-selected", "true");
      row.focus();
    }

    key(event) {
      const row = event.target.closest(".step");
      if (!row || event.ctrlKey || event.altKey || event.metaKey) return;
      this.activate(row);
      if (event.target.closest("a") && event.key === "Enter") return; // follows the link
      const i = Number(row.dataset.node);
      let next = null;
      if (event.key === "ArrowDown") next = row.nextElementSibling;
      else if (event.key === "ArrowUp") next = row.previousElementSibling;
      else if (event.key === "Home") next = this.host.firstElementChild;
      else if (event.key === "End") next = this.host.lastElementChild;
      else if (event.key === "ArrowRight") {
        if (this.children[i].length && this.isOpen(i)) next = row.nextElementSibling;
        else this.expand(i);
      } else if (event.key === "ArrowLeft") {
        if (this.children[i].length && this.isOpen(i)) this.collapse(i);
        else if (this.nodes[i].p >= 0) next = this.rows.get(this.nodes[i].p);
      } else if (event.key === "Enter" || event.key === " ") this.toggleText(i);
      else if (event.key === "*") this.nodes.forEach((_, node) => this.expand(node));
      else return;
      event.preventDefault();
      if (next) this.focus(next);
    }

    click(event) {
      const row = event.target.closest(".step");
      if (!row || event.target.closest("a")) return;
      const i = Number(row.dataset.node);
      this.focus(row);
      if (!event.target.classList.contains("twist")) this.toggleText(i);
      else if (this.isOpen(i)) this.collapse(i);
      else this.expand(i);
    }
  }

  for (const host of document.querySelectorAll(".tree")) {
    const which = Number(host.dataset.result);
    new Tree(host, results[which], "q" + which + "-c");
  }

  for (const pre of document.querySelectorAll(".card > pre.text")) rich.upgrade(pre);
  rich.upgradeOpened(document.body);

  // A link to a candidate opens it.
  function openTarget() {
    const row = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
    const details = row ? row.querySelector("details") : null;
    if (details) details.open = true;
  }
  window.addEventListener("hashchange", openTarget);
  openTarget();
})();
