"use strict";
(() => {
  const root = document.documentElement;
  const asked = new URLSearchParams(location.search).get("theme");
  if (asked === "dark" || asked === "light") root.dataset.theme = asked;
  root.classList.add("scripted");

  const dark = () =>
    root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = document.getElementById("theme");
  const name = () => { theme.textContent = dark() ? "Light theme" : "Dark theme"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  name();

  // Pictures: one Tab stop a class, arrow keys within it, Enter or a click to zoom.
  const tiles = [...document.querySelectorAll(".tile")];
  const zoom = document.getElementById("zoom");
  const picture = document.getElementById("zoom-picture");
  const caption = document.getElementById("zoom-caption");
  let at = 0;

  const show = (index) => {
    at = (index + tiles.length) % tiles.length;
    const image = tiles[at].querySelector("img");
    picture.src = image.src;
    picture.alt = image.alt;
    caption.textContent = tiles[at].dataset.caption;
  };
  const open = (index) => {
    show(index);
    if (!zoom.open) zoom.showModal();
  };
  const turn = { ArrowLeft: -1, ArrowRight: 1 };

  tiles.forEach((tile, index) => tile.addEventListener("click", () => open(index)));
  for (const grid of document.querySelectorAll(".tiles")) {
    const own = [...grid.querySelectorAll(".tile")];
    own.forEach((tile, place) => { tile.tabIndex = place ? -1 : 0; });
    grid.addEventListener("keydown", (event) => {
      const here = own.indexOf(document.activeElement);
      if (here < 0) return;
      const across = own.filter((tile) => tile.offsetTop === own[0].offsetTop).length;
      const step = {
        ...turn, ArrowUp: -across, ArrowDown: across, Home: -here, End: own.length - 1 - here,
      }[event.key];
      if (step === undefined || !own[here + step]) return;
      event.preventDefault();
      own[here].tabIndex = -1;
      own[here + step].tabIndex = 0;
      own[here + step].focus();
    });
  }
  if (tiles.length) {
    document.getElementById("zoom-before").addEventListener("click", () => show(at - 1));
    document.getElementById("zoom-after").addEventListener("click", () => show(at + 1));
    zoom.addEventListener("keydown", (event) => {
      if (event.key in turn) show(at + turn[event.key]);
    });
    zoom.addEventListener("click", (event) => { if (event.target === zoom) zoom.close(); });
    zoom.addEventListener("close", () => tiles[at].focus());
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = document.getElementById(button.dataset.code);
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  // A link into a closed part opens it; #zoom=3 opens the fourth picture.
  const follow = () => {
    const wanted = location.hash.match(/^#zoom=(\d+)$/);
    if (wanted) {
      if (Number(wanted[1]) < tiles.length) open(Number(wanted[1]));
      return;
    }
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let part = target; part; part = part.parentElement) {
      if (part.tagName === "DETAILS") part.open = true;
    }
    target.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  follow();

  // On paper every folded part is open.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const part of folded) part.open = true;
  });
  addEventListener("afterprint", () => { for (const part of folded) part.open = false; });
})();
