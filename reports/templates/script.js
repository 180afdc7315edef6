// Sorting, filtering, copying, the theme. The page says everything without it.
"use strict";
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));

  // Theme: follows the system until a button is pressed. Storage may be forbidden for files; then the choice lasts as long as the page.
  const root = document.documentElement;
  const remember = (theme) => { try { localStorage.setItem("paritree-theme", theme); } catch { /* not allowed here */ } };
  try { const theme = localStorage.getItem("paritree-theme"); if (theme) root.dataset.theme = theme; } catch { /* not allowed here */ }
  const themeButton = document.getElementById("theme");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const sayTheme = () => { themeButton.textContent = isDark() ? "Light" : "Dark"; };
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; remember(root.dataset.theme); sayTheme(); });
  sayTheme();

  // Tables: a button in each th; numbers by data-sort, words by their text; a stable sort keeps the order of equals.
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending" || (!head.hasAttribute("aria-sort") && head.dataset.first === "descending");
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const body = table.tBodies[0];
        const keyed = Array.from(body.rows, (row) => { const cell = row.cells[column]; return [cell.dataset.sort ?? cell.textContent.trim(), row]; });
        keyed.sort(([a], [b]) => {
          const [x, y] = [Number(a), Number(b)];
          const order = a !== "" && b !== "" && !Number.isNaN(x) && !Number.isNaN(y) ? (x < y ? -1 : x > y ? 1 : 0) : a.localeCompare(b, "en", { numeric: true });
          return descending ? -order : order;
        });
        body.append(...keyed.map(([, row]) => row));
      });
    });
  }

  // Findings: pressed statuses (none pressed: all), words that must all occur.
  const tools = document.getElementById("finding-tools");
  if (tools) {
    const rows = all("#finding-rows > tr"), articles = all("article[data-status]");
    const buttons = all("button[data-status]", tools), search = tools.querySelector("input"), say = tools.querySelector("[role=status]");
    const text = new Map(rows.map((row) => [row, row.textContent.toLowerCase() + " " + (row.dataset.more || "")]));
    const apply = () => {
      const wanted = new Set(buttons.filter((b) => b.getAttribute("aria-pressed") === "true").map((b) => b.dataset.status));
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const shown = new Set();
      for (const row of rows) {
        const keep = (!wanted.size || wanted.has(row.dataset.status)) && words.every((word) => text.get(row).includes(word));
        row.hidden = !keep;
        if (keep) shown.add(row.dataset.id);
      }
      for (const article of articles) article.hidden = !shown.has(article.id);
      say.textContent = `${shown.size} of ${rows.length} shown`;
    };
    buttons.forEach((button) => button.addEventListener("click", () => { button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true")); apply(); }));
    search.addEventListener("input", apply);
    // A link to a finding that the filter hides shows it.
    addEventListener("hashchange", () => { const target = document.getElementById(location.hash.slice(1)); if (target && target.hidden) { buttons.forEach((b) => b.setAttribute("aria-pressed", "false")); search.value = ""; apply(); target.scrollIntoView(); } });
    tools.hidden = false;
    apply();
  }

  // Copy: the clipboard where it is allowed, a selection otherwise.
  for (const button of all("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const source = button.parentElement.querySelector("pre");
      const range = document.createRange();
      range.selectNodeContents(source);
      let done = false;
      try { await navigator.clipboard.writeText(source.textContent); done = true; } catch {
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        try { done = document.execCommand("copy"); } catch { /* the selection stays for the keyboard */ }
      }
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
  }
})();
