"use strict";
const charts = JSON.parse(document.getElementById("numbers").textContent);
const names = [...document.querySelectorAll("#ends thead th")].slice(1).map((head) => head.textContent);
const hidden = new Set();
document.body.classList.add("scripted");

for (const box of document.querySelectorAll(".show")) {
  box.addEventListener("change", () => {
    hidden[box.checked ? "delete" : "add"](Number(box.value));
    for (const part of document.querySelectorAll(".g" + box.value)) part.classList.toggle("off", !box.checked);
  });
}

const nearest = (steps, wanted) =>
  steps.reduce((best, step, i) => (Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? i : best), 0);

function say(curve, wanted) {
  const i = nearest(curve.steps, wanted);
  const spread = curve.low ? ` (${curve.low[i]} to ${curve.high[i]})` : "";
  return `${names[curve.group]}: ${curve.mean[i]}${spread} at ${curve.steps[i]}`;
}

for (const svg of document.querySelectorAll("[data-chart]")) {
  const chart = charts[svg.dataset.chart];
  const output = svg.parentNode.querySelector("output");
  const cursor = svg.querySelector(".cursor");
  svg.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const share = (at.x - chart.left) / (chart.right - chart.left);
    const step = Math.max(0, Math.min(chart.last, share * chart.last));
    cursor.setAttribute("d", `M${chart.left + (step / chart.last) * (chart.right - chart.left)},${chart.top}V${chart.bottom}`);
    output.textContent = chart.curves.filter((curve) => !hidden.has(curve.group)).map((curve) => say(curve, step)).join(" \u00b7 ");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("d", "");
    output.textContent = "";
  });
}
