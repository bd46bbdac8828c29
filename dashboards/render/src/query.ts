// Grafana's Prometheus data source: from a target to data frames, and from a variable to its value.
import { FieldType, toDataFrame, type DataFrame } from '@grafana/data';
import { range, replaceVariables, step, values } from './grafana';

async function ask(path: string, params: Record<string, string>): Promise<any> {
  const r = await fetch(`/api/v1/${path}?` + new URLSearchParams(params));
  const body = await r.json();
  if (body.status !== 'success') throw new Error(`${body.error}: ${Object.values(params)[0]}`);
  return body.data;
}

const seconds = { start: String(range.from.valueOf() / 1000), end: String(range.to.valueOf() / 1000) };

// legend names a series as the data source does.
function legend(format: string | undefined, metric: Record<string, string>, expr: string): string {
  if (format) return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => metric[label] ?? '');
  const { __name__ = '', ...labels } = metric;
  const pairs = Object.entries(labels).map(([k, v]) => `${k}="${v}"`);
  return pairs.length || __name__ ? `${__name__}{${pairs.join(', ')}}` : expr;
}

// run asks for one target. Of a range, steps without a sample are null.
export async function run(target: any): Promise<DataFrame[]> {
  const query = replaceVariables(target.expr);
  const { refId } = target;
  if (target.instant) {
    const { result } = await ask('query', { query, time: seconds.end });
    const labels = [...new Set<string>(result.flatMap((s: any) => Object.keys(s.metric)))].sort();
    if (!result.length) return [];
    return [toDataFrame({
      refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: result.map((s: any) => s.value[0] * 1000) },
        ...labels.map((name) => ({ name, type: FieldType.string, values: result.map((s: any) => s.metric[name] ?? '') })),
        { name: 'Value', type: FieldType.number, values: result.map((s: any) => number(s.value[1])) },
      ],
    })];
  }
  const { result } = await ask('query_range', { query, ...seconds, step: String(step) });
  return result.map((s: any) => {
    const name = legend(target.legendFormat, s.metric, target.expr);
    const at = new Map<number, any>((s.values ?? s.histograms).map(([t, v]: [number, any]) => [Math.round((t - Number(seconds.start)) / step), v]));
    const times = Array.from({ length: Math.floor((Number(seconds.end) - Number(seconds.start)) / step) + 1 }, (_, i) => i);
    return toDataFrame({
      refId, name,
      fields: [
        { name: 'Time', type: FieldType.time, values: times.map((i) => (Number(seconds.start) + i * step) * 1000) },
        s.histograms
          ? { name: 'Value', type: FieldType.other, values: times.map((i) => at.get(i) ?? null) }
          : { name: 'Value', type: FieldType.number, labels: s.metric, values: times.map((i) => (at.has(i) ? number(at.get(i)) : null)), config: { displayNameFromDS: name } },
      ],
    });
  });
}

const number = (s: string) => (s === '+Inf' ? Infinity : s === '-Inf' ? -Infinity : Number(s));

// choose gives each variable of a dashboard its value: the address's, else All, else the first there is.
export async function choose(variables: any[]) {
  for (const v of variables) {
    const asked = new URLSearchParams(location.search).get('var-' + v.name);
    const m = /^label_values\((.*), (\w+)\)$/.exec(v.definition ?? '');
    if (!m) continue;
    const all: string[] = await ask(`label/${m[2]}/values`, { 'match[]': replaceVariables(m[1]), ...seconds });
    if (!all.length) throw new Error(`variable ${v.name} has no values: ${v.definition}`);
    values[v.name] = asked ?? (v.includeAll ? v.allValue : all.sort()[0]);
    v.shown = values[v.name] === '.*' ? 'All' : values[v.name];
  }
}

// annotate runs what would draw lines into the graphs, and says how many there would be.
export async function annotate(annotations: any[]): Promise<Record<string, number>> {
  const found: Record<string, number> = {};
  for (const a of annotations) {
    const { result } = await ask('query_range', { query: replaceVariables(a.expr), ...seconds, step: String(step) });
    found[a.name] = result.length;
  }
  return found;
}
