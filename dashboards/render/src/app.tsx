// A dashboard, from the address's ?dashboard=FILE: Grafana's grid of 24 columns, or one column in a narrow window.
import { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { ThemeContext, createTheme } from '@grafana/data';
import { GlobalStyles, Icon } from '@grafana/ui';
import { init } from './grafana';
import { Panel } from './panel';
import { annotate, choose } from './query';

// Grafana's grid: the height of a cell, what is between two, and from which width on it has columns.
const cell = 30, gap = 8, columns = 24, wide = 769, margin = 16;

function Dashboard({ model, others }: { model: any; others: any[] }) {
  const dark = useMedia('(prefers-color-scheme: dark)');
  const theme = createTheme({ colors: { mode: dark ? 'dark' : 'light' } });
  const width = useWidth() - 2 * margin;
  const grid = width + 2 * margin >= wide;
  const unit = (width + gap) / columns;
  let below = 0;
  const placed = model.panels.map((p: any) => {
    const { x, y, w, h } = p.gridPos;
    const height = h * (cell + gap) - gap;
    const at = grid ? { left: x * unit, top: y * (cell + gap), width: w * unit - gap, height } : { left: 0, top: below, width, height };
    below = Math.max(below, at.top + height + gap);
    return { p, at };
  });
  useEffect(() => { document.body.style.cssText = `margin: 0; background: ${theme.colors.background.canvas}`; }, [theme]);
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ padding: margin, font: `${theme.typography.fontSize}px ${theme.typography.fontFamily}`, color: theme.colors.text.primary }}>
        <header style={{ display: 'flex', flexWrap: 'wrap', gap: '4px 16px', alignItems: 'baseline', marginBottom: 12 }}>
          <h1 style={{ fontSize: 18, margin: 0 }} title={model.description}>{model.title}</h1>
          {model.templating.list.filter((v: any) => v.shown).map((v: any) => <span key={v.name} data-variable={v.name}>{v.label}: <b>{v.shown}</b></span>)}
          <nav style={{ display: 'flex', flexWrap: 'wrap', gap: '0 12px' }}>{others.map((d) => <a key={d.uid} href={'/d/' + d.uid} style={{ color: theme.colors.text.link }}>{d.title.replace('Lockstep / ', '')}</a>)}</nav>
        </header>
        <main style={{ position: 'relative', height: below }}>
          {placed.map(({ p, at }: any) => (
            <div key={p.id} data-grid={p.title} style={{ position: 'absolute', ...at }}>
              {p.type === 'row' ? <h2 style={{ fontSize: 16, margin: '4px 0' }}><Icon name="angle-down" /> {p.title}</h2> : <Panel p={p} width={at.width} height={at.height} theme={theme} />}
            </div>
          ))}
        </main>
      </div>
    </ThemeContext.Provider>
  );
}

function useMedia(query: string): boolean {
  const list = matchMedia(query);
  const [on, set] = useState(list.matches);
  useEffect(() => {
    const f = () => set(list.matches);
    list.addEventListener('change', f);
    return () => list.removeEventListener('change', f);
  });
  return on;
}

function useWidth(): number {
  const now = () => Math.max(320, document.documentElement.clientWidth); // it is 0 while the window changes
  const [width, set] = useState(now);
  useEffect(() => {
    const f = () => set(now);
    addEventListener('resize', f);
    return () => removeEventListener('resize', f);
  });
  return width;
}

(async () => {
  init();
  const get = async (path: string) => (await fetch(path)).json();
  const file = new URLSearchParams(location.search).get('dashboard')!;
  const [model, all] = await Promise.all([get(file), get('/dashboards')]);
  await choose(model.templating.list);
  (window as any).annotations = await annotate(model.annotations.list);
  // A link of type "dashboards" leads to all that have its tags.
  const tags: string[] = (model.links ?? []).filter((l: any) => l.type === 'dashboards').flatMap((l: any) => l.tags);
  const others = all.filter((d: any) => d.uid !== model.uid && tags.every((t) => d.tags.includes(t)));
  createRoot(document.getElementById('root')!).render(<Dashboard model={model} others={others} />);
})().catch((e) => console.error(String(e)));
