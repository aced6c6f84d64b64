// Texts of a search's page as what they mean. Without this script they stand as they were written.
(() => {
  "use strict";
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
