// A panel: its queries, transformations and field configuration as Grafana applies them, drawn by Grafana's components.
import { useEffect, useMemo, useState } from 'react';
import { lastValueFrom } from 'rxjs';
import { LoadingState, VizOrientation, applyFieldOverrides, cacheFieldDisplayNames, getDisplayValueAlignmentFactors, getFieldDisplayValues, transformDataFrame, type DataFrame, type GrafanaTheme2 } from '@grafana/data';
import { BigValue, Dropdown, Icon, Menu, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { Heatmap, Timeline } from './drawn';
import { range, registryFor, replaceVariables } from './grafana';
import { run } from './query';

// What a visualization's options are where a dashboard does not say.
const customDefaults: Record<string, object> = {
  timeseries: {
    drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0, gradientMode: 'none', pointSize: 5, showPoints: 'auto', spanNulls: false, insertNulls: false,
    axisPlacement: 'auto', axisColorMode: 'text', axisBorderShow: false, axisLabel: '', axisCenteredZero: false, scaleDistribution: { type: 'linear' }, stacking: { mode: 'none', group: 'A' },
    thresholdsStyle: { mode: 'off' }, hideFrom: { viz: false, legend: false, tooltip: false }, barAlignment: 0,
  },
  table: { width: undefined, minWidth: undefined, align: 'auto', cellOptions: { type: 'auto' }, inspect: false, footer: { reducers: [] } },
};

function configOf(p: any) {
  const from = p.fieldConfig?.defaults ?? {};
  const custom = { ...customDefaults[p.type], ...from.custom };
  const steps = (from.thresholds?.steps ?? []).map((s: any) => ({ ...s, value: s.value ?? -Infinity }));
  const color = from.color ?? { mode: p.type === 'timeseries' ? 'palette-classic' : 'thresholds' };
  return { defaults: { mappings: [], ...from, color, custom, thresholds: { mode: 'absolute', steps } }, overrides: p.fieldConfig?.overrides ?? [] };
}

const named = (frames: DataFrame[]) => (cacheFieldDisplayNames(frames), frames);

interface State { frames?: DataFrame[]; error?: string }

export function Panel({ p, width, height, theme }: { p: any; width: number; height: number; theme: GrafanaTheme2 }) {
  const [state, set] = useState<State>({});
  useEffect(() => {
    (async () => {
      const raw = (await Promise.all(p.targets.map(run))).flat();
      set({ frames: await lastValueFrom(transformDataFrame(p.transformations ?? [], raw)) });
    })().catch((e) => set({ error: String(e) }));
  }, [p]);
  const config = useMemo(() => configOf(p), [p]);
  const frames = useMemo(
    () => state.frames && named(applyFieldOverrides({ data: state.frames, fieldConfig: config as any, replaceVariables, theme, timeZone: 'browser', fieldConfigRegistry: registryFor(config.defaults.custom) })),
    [state.frames, config, theme],
  );
  const has = frames?.some((f) => f.fields.some((x) => x.values.some((v) => v !== null && !Number.isNaN(v))));
  const says = state.error ? 'error: ' + state.error : !frames ? 'loading' : has ? 'data' : 'empty';
  return (
    <section data-panel={p.title} data-type={p.type} data-state={says} style={{ width, height }}>
      <PanelChrome width={width} height={height} title={p.title} description={p.description} loadingState={frames || state.error ? LoadingState.Done : LoadingState.Loading} statusMessage={state.error} titleItems={<Links links={p.links ?? []} />}>
        {(w, h) => (!frames ? <></> : has ? <Drawn p={p} frames={frames} config={config} width={w} height={h} theme={theme} /> : <Nothing text={config.defaults.noValue ?? 'No data'} />)}
      </PanelChrome>
    </section>
  );
}

const Nothing = ({ text }: { text: string }) => <div style={{ height: '100%', display: 'flex', alignItems: 'center', justifyContent: 'center' }}>{text}</div>;

// Links are a panel's: one is an icon that leads there, several a menu.
function Links({ links }: { links: any[] }) {
  if (!links.length) return null;
  if (links.length === 1) return <PanelChrome.TitleItem href={links[0].url} target="_blank" title={links[0].title}><Icon name="external-link-alt" /></PanelChrome.TitleItem>;
  const menu = <Menu>{links.map((l) => <Menu.Item key={l.title} label={l.title} url={l.url} target="_blank" />)}</Menu>;
  return <span data-links><Dropdown overlay={menu}><PanelChrome.TitleItem title="Panel links"><Icon name="external-link-alt" /></PanelChrome.TitleItem></Dropdown></span>;
}

function Drawn({ p, frames, config, width, height, theme }: any) {
  switch (p.type) {
    case 'timeseries':
      return <TimeSeries frames={frames} structureRev={1} timeRange={range} timeZone="browser" width={width} height={height} legend={{ calcs: [], ...p.options.legend }} options={p.options} />;
    case 'table':
      return <TableNG data={frames[0]} width={width} height={height} cellHeight={p.options.cellHeight ?? 'sm'} noHeader={!(p.options.showHeader ?? true)} fieldConfig={config} enableVirtualization={false} />;
    case 'state-timeline':
      return <Timeline frames={frames} width={width} height={height} theme={theme} />;
    case 'heatmap':
      return <Heatmap frames={frames} width={width} height={height} theme={theme} unit={p.options.yAxis.unit} />;
    case 'stat':
      return <Stat p={p} frames={frames} config={config} width={width} height={height} theme={theme} />;
  }
  throw new Error(`panel ${p.title}: nothing draws a ${p.type}`);
}

function Stat({ p, frames, config, width, height, theme }: any) {
  const o = p.options;
  return (
    <VizRepeater
      source={frames} renderCounter={0} width={width} height={height} itemSpacing={3} autoGrid orientation={o.orientation || VizOrientation.Auto} getAlignmentFactors={getDisplayValueAlignmentFactors as any}
      getValues={() => getFieldDisplayValues({ fieldConfig: config, reduceOptions: { values: false, ...o.reduceOptions }, replaceVariables, theme, data: frames, sparkline: o.graphMode !== 'none', timeZone: 'browser' })}
      renderValue={({ value, width, height, alignmentFactors, count }: any) => (
        <BigValue value={value.display} count={count} sparkline={value.sparkline} colorMode={o.colorMode} graphMode={o.graphMode} justifyMode={o.justifyMode ?? 'auto'} textMode={o.textMode} alignmentFactors={alignmentFactors} width={width} height={height} theme={theme} />
      )}
    />
  );
}
