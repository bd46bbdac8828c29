"use strict";
// The page asks for itself again and changes what differs, so that focus, scrolling and what
// was opened stay. Without it the page reloads.
(() => {
  const every = Number(document.documentElement.dataset.refresh) * 1000;
  if (!every) return;
  const key = (n) => n.nodeType === 1 && n.id || "";
  const morph = (was, is) => {
    if (was.nodeType !== is.nodeType || was.nodeName !== is.nodeName || key(was) !== key(is)) {
      was.replaceWith(is);
      return;
    }
    if (was.nodeType !== 1) {
      if (was.nodeValue !== is.nodeValue) was.nodeValue = is.nodeValue;
      return;
    }
    if (was.nodeName === "SCRIPT" || was.isEqualNode(is)) return;
    for (const { name } of [...was.attributes]) {
      if (!is.hasAttribute(name) && !(name === "open" && was.nodeName === "DETAILS")) was.removeAttribute(name);
    }
    for (const { name, value } of is.attributes) {
      if (was.getAttribute(name) !== value) was.setAttribute(name, value);
    }
    const byKey = new Map([...was.children].filter(key).map((n) => [n.id, n]));
    let at = was.firstChild;
    for (const next of [...is.childNodes]) {
      const same = byKey.get(key(next));
      if (same && same !== at) {
        was.insertBefore(same, at);
        at = same;
      }
      if (!at) {
        was.appendChild(next);
        continue;
      }
      const after = at.nextSibling;
      if (!same && key(at)) {
        was.insertBefore(next, at);
        continue;
      }
      morph(at, next);
      at = after;
    }
    while (at) {
      const after = at.nextSibling;
      at.remove();
      at = after;
    }
  };
  const refresh = async () => {
    if (!document.hidden) {
      let text = "";
      try {
        const answer = await fetch(location.origin + location.pathname + location.search, { cache: "no-store", signal: AbortSignal.timeout(10000) });
        if (answer.ok) text = await answer.text();
      } catch { /* said below */ }
      if (text) {
        const is = new DOMParser().parseFromString(text, "text/html");
        document.title = is.title;
        morph(document.body, is.body);
      } else {
        document.getElementById("unreachable").hidden = false;
      }
    }
    setTimeout(refresh, every);
  };
  setTimeout(refresh, every);
})();
