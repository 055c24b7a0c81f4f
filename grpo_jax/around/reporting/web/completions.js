"use strict";
// The completions of a step, side by side. What a model wrote is put into the page as text alone.

(() => {
  const runs = JSON.parse(at("completions").textContent);
  const fill = (select, labels, chosen) => {
    select.replaceChildren(...labels.map((label, i) => {
      const option = make("option", "", label);
      option.value = i;
      return option;
    }));
    select.value = Math.min(chosen, labels.length - 1);
  };
  const shade = {
    // Unlikely tokens are orange: full colour at a probability of 1 in 50.
    logprob: (member, t) => `rgba(230, 120, 0, ${Math.min(.75, -(member.logprobs[t] ?? 0) / 5)})`,
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
  const label = turn => turn.reward === null ? turn.role : `${turn.role}, reward ${turn.reward}`;
  const completion = member => {
    const box = make("div", "completion");
    if (!member.tokens) { box.textContent = member.text; return box; }
    const turns = member.turns ?? [];
    member.tokens.forEach((text, t) => {
      const begun = turns.filter(turn => turn.start === t);
      if (begun.length) box.append(make("div", "turn", begun.map(label).join(", ")));
      const turn = turns.find(turn => turn.start <= t && t < turn.end);
      const isGiven = turn && turn.role !== "assistant";
      const token = make("span", isGiven ? "given" : "", text);
      if (isGiven) { box.append(token); return; }
      token.style.background = shade[at("color").value](member, t);
      token.title = `${JSON.stringify(text)}  log-prob ${number(member.logprobs[t])}`;
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
    const extras = Object.entries(member.extras ?? {});
    extras.forEach(([name, text]) => made.append(make("div", "muted", `${name}: ${text}`)));
    return made;
  };
  const show = () => {
    const run = runs[at("run").value], step = run.steps[at("step").value];
    at("colors").textContent = legends[at("color").value];
    at("remarks").textContent = run.remarks.length ? `Shown: ${run.remarks.join("; ")}.` : "";
    if (!step) { at("shown").textContent = "This run has no saved completions."; return; }
    const group = step.groups[at("group").value], members = make("div", "members");
    group.members.forEach(member => members.append(card(member)));
    const images = make("div", "images");
    for (const image of group.images) {
      const shown = make(image.thumbnail ? "img" : "span", "muted", image.thumbnail ? "" : image.source);
      if (image.thumbnail) Object.assign(shown, {src: image.thumbnail, title: image.source});
      images.append(shown);
    }
    at("shown").replaceChildren(images, make("div", "prompt", group.prompt), members);
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
