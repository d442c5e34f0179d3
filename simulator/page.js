"use strict";
// Words beside the pointer, and the instructions of a source line (and back) on a click.
const tip = document.getElementById("tip");
const columnsOf = (id) => JSON.parse(document.getElementById(id).textContent);
const known = {};
document.addEventListener("mousemove", (event) => {
  const holder = event.target.closest("[data-columns], [data-tip]");
  if (!holder) { tip.style.display = "none"; return; }
  if (holder.dataset.columns) {
    const columns = known[holder.dataset.columns] ??= columnsOf(holder.dataset.columns);
    const box = holder.getBoundingClientRect();
    const at = Math.floor((event.clientX - box.left) / box.width * columns.length);
    tip.textContent = columns[Math.max(0, Math.min(columns.length - 1, at))];
  } else {
    tip.textContent = holder.dataset.tip;
  }
  tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
});
document.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-l]");
  if (!row) return;
  for (const other of document.querySelectorAll("tr.on")) other.classList.remove("on");
  for (const pane of document.querySelectorAll(".pane")) {
    const same = [...pane.querySelectorAll("tr[data-l]")].filter((r) => r.dataset.l === row.dataset.l);
    for (const r of same) r.classList.add("on");
    if (same.length && !pane.contains(row)) pane.scrollTop = same[0].offsetTop - pane.clientHeight / 3;
  }
});
// The costliest line is marked first; a page may show a kernel of thousands of instructions.
const costliest = document.querySelector("tr[data-most]");
if (costliest) {
  costliest.click();
  const pane = costliest.closest(".pane");
  pane.scrollTop = costliest.offsetTop - pane.clientHeight / 3;
}
