// The two visualizations of the dashboards that Grafana's packages lack, since they are plugins of its own front end:
// drawn here, simply, with the text and colours that Grafana's field configuration gives.
import { useEffect, useRef } from 'react';
import { formattedValueToString, getFieldDisplayName, getValueFormat, type DataFrame, type GrafanaTheme2 } from '@grafana/data';
import { range, step } from './grafana';

// Timeline draws a line of states for each series.
export function Timeline({ frames, width, height, theme }: { frames: DataFrame[]; width: number; height: number; theme: GrafanaTheme2 }) {
  const row = (height - 24) / frames.length;
  const label = Math.min(180, width / 3);
  const from = range.from.valueOf();
  const x = (t: number) => label + ((t - from) / (range.to.valueOf() - from)) * (width - label);
  const ticks = [0, 1, 2, 3].map((i) => from + ((i + 0.5) / 4) * (range.to.valueOf() - from));
  return (
    <svg width={width} height={height} style={{ display: 'block', font: `12px ${theme.typography.fontFamily}` }}>
      {frames.map((frame, f) => {
        const [time, field] = frame.fields;
        const runs: any[] = [];
        field.values.forEach((v: number | null, i: number) => {
          if (v === null) return;
          const last = runs[runs.length - 1];
          if (last && last.v === v && last.i === i - 1) last.i = i;
          else runs.push({ v, i, t: time.values[i] });
        });
        const name = getFieldDisplayName(field, frame, frames);
        return (
          <g key={name}>
            <text x={label - 8} y={row * (f + 0.5)} textAnchor="end" dominantBaseline="central" fill={theme.colors.text.primary} data-full={name}>{short(name, label - 12)}</text>
            {runs.map((r) => {
              const d = field.display!(r.v);
              return <rect key={r.t} x={x(r.t)} y={row * (f + 0.1)} width={Math.max(1, x(Math.min(time.values[r.i] + step * 1000, range.to.valueOf())) - x(r.t))} height={row * 0.8} fill={d.color} fillOpacity={0.8} data-state={d.text} />;
            })}
          </g>
        );
      })}
      {ticks.map((t) => <text key={t} x={x(t)} y={height - 6} textAnchor="middle" fill={theme.colors.text.primary}>{new Date(t).toTimeString().slice(0, 8)}</text>)}
    </svg>
  );
}

// short ends a name that has no room.
const short = (name: string, room: number) => (name.length * 6.5 > room ? name.slice(0, Math.floor(room / 6.5) - 1) + '…' : name);

// Heatmap draws the buckets of a native histogram over time.
export function Heatmap({ frames, width, height, theme, unit }: { frames: DataFrame[]; width: number; height: number; theme: GrafanaTheme2; unit: string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const c = canvas.current!.getContext('2d')!;
    c.clearRect(0, 0, width, height);
    const cells: Array<{ i: number; low: number; high: number; count: number }> = [];
    const columns = frames[0].fields[0].values.length;
    for (const frame of frames) {
      frame.fields[1].values.forEach((h: any, i: number) => {
        for (const [, low, high, count] of h?.buckets ?? []) if (Number(low) > 0) cells.push({ i, low: Number(low), high: Number(high), count: Number(count) });
      });
    }
    const low = Math.log(Math.min(...cells.map((x) => x.low)));
    const high = Math.log(Math.max(...cells.map((x) => x.high)));
    const most = Math.max(...cells.map((x) => x.count));
    const left = 70;
    const y = (v: number) => (height - 24) * (1 - (Math.log(v) - low) / (high - low));
    const w = (width - left) / columns;
    for (const x of cells) {
      const share = Math.sqrt(x.count / most);
      c.fillStyle = `rgba(${255 - 100 * share}, ${200 - 140 * share}, ${130 - 120 * share}, ${0.2 + 0.8 * share})`;
      c.fillRect(left + x.i * w, y(x.high), Math.ceil(w), Math.ceil(y(x.low) - y(x.high)));
    }
    c.fillStyle = theme.colors.text.primary;
    c.font = `12px ${theme.typography.fontFamily}`;
    c.textAlign = 'right';
    const format = getValueFormat(unit);
    for (let i = 0; i <= 4; i++) c.fillText(formattedValueToString(format(Math.exp(low + ((high - low) * i) / 4))), left - 8, Math.max(10, (height - 24) * (1 - i / 4)));
    c.textAlign = 'center';
    for (let i = 0; i < 6; i++) {
      const t = range.from.valueOf() + ((i + 0.5) / 6) * (range.to.valueOf() - range.from.valueOf());
      c.fillText(new Date(t).toTimeString().slice(0, 8), left + ((i + 0.5) / 6) * (width - left), height - 6);
    }
  }, [frames, width, height, theme, unit]);
  return <canvas ref={canvas} width={width} height={height} />;
}
