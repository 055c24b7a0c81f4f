"""The HTML of the page. What a model wrote is put into it as text alone, never as HTML."""

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>grpo_jax: {{ title }}</title>
<style>
  body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 0 auto; padding: 1rem;
    max-width: 1400px; }
  h1 { font-size: 1.5rem; margin: 0.2rem 0 1rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
  table { border-collapse: collapse; } .wide { overflow-x: auto; }
  th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #e4e4e4;
    vertical-align: top; }
  th { font-weight: 600; color: #555; white-space: nowrap; }
  code, .completion, .prompt { font: 13px/1.5 ui-monospace, monospace; }
  .muted { color: #666; } details { margin: .4rem 0; } summary { cursor: pointer; }
  .figures { display: grid; gap: 1rem;
    grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
  .figures > div { min-width: 0; }
  .controls { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; margin: .5rem 0; }
  .members { display: grid; gap: .8rem;
    grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); }
  .member { border: 1px solid #ddd; border-radius: 6px; padding: .5rem .7rem; min-width: 0; }
  .member header { display: flex; flex-wrap: wrap; gap: 0 .9rem; color: #555; font-size: 13px;
    border-bottom: 1px solid #eee; margin-bottom: .4rem; }
  .completion, .prompt { white-space: pre-wrap; overflow-wrap: anywhere; }
  .prompt { background: #f6f6f6; border-radius: 6px; padding: .5rem .7rem; margin: .5rem 0; }
  .completion { max-height: 26rem; overflow-y: auto; } .completion span { border-radius: 2px; }
</style>
{{ bokeh|safe }}
</head>
<body>
<h1>{{ title }}</h1>
<div class="wide"><table>
<tr><th>run</th><th>seed</th><th>state</th><th>held-out accuracy (95% interval)</th>
<th>reward</th><th>time of its steps</th><th>started on</th></tr>
{% for run in runs %}
<tr><td>{{ run.name }}</td><td>{{ run.seed }}</td><td>{{ run.state }}</td>
<td>{{ run.accuracy }}</td><td>{{ run.reward }}</td><td>{{ run.hours }}</td>
<td class="muted">{% for start in run.starts %}{{ start }}{{ "" if loop.last else "; " }}
{% endfor %}</td></tr>
{% endfor %}
</table></div>

{% if differing.rows %}
<h2>What differs</h2>
<div class="wide"><table>
<tr><th>setting</th>{% for label in differing.labels %}<th>{{ label }}</th>{% endfor %}</tr>
{% for key, values in differing.rows %}
<tr><td><code>{{ key }}</code></td>
{% for value in values %}<td><code>{{ value }}</code></td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endif %}

<h2>Settings</h2>
{% for name, settings in changed.items() %}
<details><summary>{{ name }}: {{ settings|length }} settings differ from their defaults</summary>
<div class="wide"><table><tr><th>setting</th><th>value</th><th>default</th></tr>
{% for key, (value, default) in settings.items() %}
<tr><td><code>{{ key }}</code></td><td><code>{{ value }}</code></td>
<td class="muted"><code>{{ default }}</code></td></tr>
{% endfor %}
</table></div></details>
{% endfor %}

<h2>Curves</h2>
<p class="muted">A curve of several seeds is their mean; its band goes from the lowest to the
highest seed. For one run, the band of the accuracy is its 95% interval. Click a name in a legend to
hide its curve.</p>
{% if figures %}
<div class="figures">{% for figure in figures %}<div>{{ figure|safe }}</div>{% endfor %}</div>
{% else %}
<p>There are no metrics yet.</p>
{% endif %}

<h2>Completions</h2>
<div class="controls" id="controls">
  <label>run <select id="run"></select></label>
  <label>step <select id="step"></select></label>
  <label>group <select id="group"></select></label>
  <label>colour tokens by <select id="color">
    <option value="logprob">log-prob</option><option value="advantage">advantage</option>
    <option value="none">nothing</option></select></label>
</div>
<p class="muted" id="legend"></p>
<p class="muted" id="remarks"></p>
<div id="shown"></div>
{{ script|safe }}
<script type="application/json" id="completions">{{ completions|safe }}</script>
<script>
"use strict";
(() => {
  const runs = JSON.parse(document.getElementById("completions").textContent);
  const at = id => document.getElementById(id);
  const make = (tag, className, text) => {
    const made = document.createElement(tag);
    made.className = className;
    if (text !== undefined) made.textContent = text;  // as text, never as HTML
    return made;
  };
  const fill = (select, labels, chosen) => {
    select.replaceChildren(...labels.map((label, i) => {
      const option = make("option", "", label);
      option.value = i;
      return option;
    }));
    select.value = Math.min(chosen, labels.length - 1);
  };
  const number = x => x === null || x === undefined ? "-" : String(Math.round(x * 1e4) / 1e4);
  const shade = {
    // Unlikely tokens are orange: full colour at a probability of 1 in 50.
    logprob: (member, t) => `rgba(230, 120, 0, ${Math.min(.75, -member.logprobs[t] / 5)})`,
    advantage: (member, t) => member.advantage >= 0
      ? `rgba(0, 114, 178, ${Math.min(.6, member.advantage / 3)})`
      : `rgba(213, 94, 0, ${Math.min(.6, -member.advantage / 3)})`,
    none: () => "transparent",
  };
  const legends = {
    logprob: "The darker the orange, the less likely the token was. Point at one for its log-prob.",
    advantage: "Blue: the advantage is positive. Orange: it is negative. It is that of the first "
      + "token of a completion.",
    none: "",
  };
  const completion = member => {
    const box = make("div", "completion");
    if (!member.tokens) { box.textContent = member.text; return box; }
    member.tokens.forEach((text, t) => {
      const token = make("span", "", text);
      token.style.background = shade[at("color").value](member, t);
      token.title = `${JSON.stringify(text)}  log-prob ${member.logprobs[t]}`;
      box.append(token);
    });
    return box;
  };
  const card = member => {
    const made = make("div", "member"), head = make("header", "");
    const entries = [["reward", member.reward], ["advantage", member.advantage],
      ["tokens", member.length], ...Object.entries(member.scores)];
    entries.forEach(([name, x]) => head.append(make("span", "", `${name} ${number(x)}`)));
    made.append(head, completion(member));
    return made;
  };
  const show = () => {
    const run = runs[at("run").value], step = run.steps[at("step").value];
    at("legend").textContent = legends[at("color").value];
    at("remarks").textContent = run.remarks.length ? `Shown: ${run.remarks.join("; ")}.` : "";
    if (!step) { at("shown").textContent = "This run has no saved completions."; return; }
    const group = step.groups[at("group").value], members = make("div", "members");
    group.members.forEach(member => members.append(card(member)));
    at("shown").replaceChildren(make("div", "prompt", group.prompt), members);
    if (group.left_out) at("shown").append(make("p", "muted", `${group.left_out} more`));
  };
  const short = text => text.length > 60 ? `${text.slice(0, 60)}...` : text;
  const chooseStep = () => {
    const step = runs[at("run").value].steps[at("step").value];
    fill(at("group"), step ? step.groups.map((g, i) => `${i + 1}: ${short(g.prompt)}`) : [], 0);
    show();
  };
  const chooseRun = () => {
    const steps = runs[at("run").value].steps;
    fill(at("step"), steps.map(s => s.step), steps.length - 1);
    chooseStep();
  };
  fill(at("run"), runs.map(run => run.name), 0);
  at("run").onchange = chooseRun;
  at("step").onchange = chooseStep;
  at("group").onchange = at("color").onchange = show;
  chooseRun();
})();
</script>
</body>
</html>
"""
