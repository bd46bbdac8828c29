// What Grafana's server and its own front end give to @grafana/data: variables, the registry of field options, transformations.
import {
  FieldConfigOptionsRegistry, dateTime, locationUtil, standardTransformers, standardTransformersRegistry, type ScopedVars, type TimeRange,
} from '@grafana/data';

const query = new URLSearchParams(location.search);

// The range ends at a moment that the address names, so that the same address always shows the same.
const end = Number(query.get('to'));
const span = Number(query.get('range'));
export const step = Number(query.get('step')) / 1000;
export const range: TimeRange = { from: dateTime(end - span), to: dateTime(end), raw: { from: dateTime(end - span), to: dateTime(end) } };

// values are the dashboard's variables, as label matchers have them.
export const values: Record<string, string> = {
  datasource: 'prometheus', traces: 'traces', __from: String(end - span), __to: String(end),
  __interval: `${step * 1000}ms`, __rate_interval: `${Math.max(4 * step, Number(query.get('rate')) / 1000) * 1000}ms`, __range: `${span}ms`,
};

// replaceVariables is Grafana's templateSrv.replace as far as the dashboards use it.
export function replaceVariables(text: string, scoped?: ScopedVars, format?: any): string {
  return text.replace(/\$\{(__value\.raw)\}|\$\{(\w+)(?::\w+)?\}|\$(\w+)/g, (whole, macro, braced, bare) => {
    if (macro) {
      const c: any = scoped?.__dataContext?.value;
      const v = String(c?.field?.values[c.rowIndex] ?? '');
      return format === 'uriencode' ? encodeURIComponent(v) : v;
    }
    return values[braced ?? bare] ?? whole;
  });
}

const option = (path: string, isCustom: boolean) => ({
  id: isCustom ? 'custom.' + path : path, path, name: path, isCustom, settings: {}, editor: () => null, override: () => null, process: (v: any) => v, shouldApply: () => true,
});
const standard = ['displayName', 'unit', 'min', 'max', 'decimals', 'color', 'thresholds', 'mappings', 'noValue', 'links', 'actions', 'filterable', 'description', 'displayNameFromDS'];

// registryFor has the options that a field of a visualization may have.
export const registryFor = (custom: object) =>
  new FieldConfigOptionsRegistry(() => [...standard.map((p) => option(p, false)), ...Object.keys(custom).map((p) => option(p, true))] as any);

export function init() {
  const byId = new Map(Object.values(standardTransformers).map((t: any) => [t.id, { id: t.id, name: t.name, transformation: async () => t, editor: () => null }])); // some have two names
  standardTransformersRegistry.setInit(() => [...byId.values()] as any);
  locationUtil.initialize({ config: { appSubUrl: '', appUrl: '/' } as any, getVariablesUrlParams: () => ({}), getTimeRangeForUrl: () => ({ from: values.__from, to: values.__to }) as any });
}
