"use strict";
(() => {
  const $ = (id) => document.getElementById(id), form = $("settings"), frame = $("page"), state = $("state");
  let stamp = "", timer = 0;
  const load = () => {
    const asked = new URLSearchParams();
    for (const each of form.elements) if (each.name && each.value && each.value !== each.dataset.given) asked.set(each.name, each.value);
    state.textContent = "analysing ...";
    frame.src = "report?" + asked;
  };
  frame.addEventListener("load", () => { state.textContent = ""; });
  form.addEventListener("input", (event) => {
    const shown = $(event.target.name + "-value");
    if (shown) shown.textContent = event.target.value;
    clearTimeout(timer);
    timer = setTimeout(load, 400);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  const watch = async () => {
    try {
      const now = await (await fetch("stamp")).text();
      if (stamp && now !== stamp) load();
      stamp = now;
    } catch { state.textContent = "the server has ended"; }
    setTimeout(watch, 1000);
  };
  load();
  watch();
})();
