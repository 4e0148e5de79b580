// Draws the pictures of a report one after the other, and hides strategies. The style sheet sets the colours.
const page = JSON.parse(document.getElementById("data").textContent);
const views = [];
const hidden = new Set();

function show(view) {
  view.signal("hidden", [...hidden]);
  return view.runAsync();
}

async function draw({ id, spec }) {
  const name = spec.data && spec.data.name;
  const datasets = name in page.datasets ? { [name]: page.datasets[name] } : spec.datasets;
  const options = { actions: false, renderer: "svg", ast: true, config: page.config, tooltip: { theme: "page" } };
  const { view } = await vegaEmbed(document.getElementById(id), { ...spec, datasets }, options);
  views.push(view);
  if (hidden.size) await show(view);
}

function toggle(name) {
  if (!hidden.delete(name)) hidden.add(name);
  for (const button of document.querySelectorAll("button[data-cell]")) {
    button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.cell)));
  }
  views.forEach(show);
}

for (const button of document.querySelectorAll("button[data-cell]")) {
  button.addEventListener("click", () => toggle(button.dataset.cell));
}

(async () => {
  for (const figure of page.figures) await draw(figure);
  document.documentElement.dataset.drawn = String(views.length);
})();
