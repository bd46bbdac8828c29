// Bundles src/ into a folder: node build.cjs MODULES OUT, where MODULES is the node_modules of package-lock.json.
// esbuild gives the .mjs files of @grafana/* Node's interop, under which a CommonJS default is module.exports and some
// of their own imports break; resolved by their "require" condition they work.
const path = require('node:path');
const [modules, outdir] = process.argv.slice(2).map((p) => path.resolve(p));
const from = require('node:module').createRequire(path.join(modules, 'x.cjs'));
from('esbuild').build({
  entryPoints: [path.join(__dirname, 'src/app.tsx')], outdir, bundle: true, minify: true, format: 'esm', splitting: true, jsx: 'automatic', logLevel: 'error',
  nodePaths: [modules], define: { 'process.env.NODE_ENV': '"production"', global: 'window' }, loader: { '.svg': 'dataurl', '.woff': 'dataurl', '.woff2': 'dataurl', '.ttf': 'dataurl' },
  plugins: [{ name: 'grafana', setup: (b) => b.onResolve({ filter: /^@grafana\// }, (a) => ({ path: from.resolve(a.path) })) }],
}).catch(() => process.exit(1));
