// Part of nccl.cu: its command line.

struct Options {
  int ranks = 0;  // 0: all GPUs
  size_t begin = 8, end = size_t(4) << 30;
  size_t factor = 4;
  std::vector<std::string> colls{"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv"};
  std::vector<std::string> modes{"default", "registered"};
  std::vector<std::string> launches{"stream", "graph"};
  double blockMillis = 12;
  int blocks = 3;
  int graphOps = 20;
  size_t check = size_t(4) << 30;
  bool fixed = false;
  double limit = 300;     // seconds for everything
  double watchdog = 30;   // seconds for one measurement
  double seconds = 0;     // of GEMM; 0: two, or with -gemm-only until a signal
  int gemmSize = 8192;
  bool gemm = false, gemmOnly = false, sizesGiven = false;
};

static size_t parseSize(const char *text) {
  char *end;
  double v = strtod(text, &end);
  switch (*end) {
    case 'k': case 'K': v *= 1 << 10; end++; break;
    case 'm': case 'M': v *= 1 << 20; end++; break;
    case 'g': case 'G': v *= 1 << 30; end++; break;
  }
  if (end == text || *end || v < 0 || v > double(size_t(1) << 40)) die("size %s: want bytes, such as 8, 4K, 64M or 1G", text);
  return size_t(v);
}

static std::vector<std::string> parseList(const char *option, const char *text, const std::vector<std::string> &known) {
  std::vector<std::string> list;
  std::string rest = text;
  while (!rest.empty()) {
    size_t comma = std::min(rest.find(','), rest.size());
    std::string item = rest.substr(0, comma);
    if (std::find(known.begin(), known.end(), item) == known.end()) {
      std::string all;
      for (const std::string &k : known) all += " " + k;
      die("%s %s: want some of%s", option, item.c_str(), all.c_str());
    }
    list.push_back(item);
    rest = comma < rest.size() ? rest.substr(comma + 1) : "";
  }
  if (list.empty()) die("%s: want a list", option);
  return list;
}

static Options parse(int argc, char **argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    std::string a = argv[i];
    if (a.rfind("--", 0) == 0) a = a.substr(1);
    if (a == "-gemm") { o.gemm = true; continue; }
    if (a == "-gemm-only") { o.gemmOnly = true; continue; }
    if (a == "-fixed") { o.fixed = true; continue; }
    if (i + 1 >= argc) die("%s: no such option, or it lacks its value (the head of nccl.cu lists them)", argv[i]);
    const char *v = argv[++i];
    if (a == "-g") o.ranks = atoi(v);
    else if (a == "-b") { o.begin = parseSize(v); o.sizesGiven = true; }
    else if (a == "-e") { o.end = parseSize(v); o.sizesGiven = true; }
    else if (a == "-f") o.factor = size_t(atoi(v));
    else if (a == "-coll") o.colls = parseList("-coll", v, Options().colls);
    else if (a == "-mode") o.modes = parseList("-mode", v, {"default", "registered", "ce"});
    else if (a == "-launch") o.launches = parseList("-launch", v, Options().launches);
    else if (a == "-block-ms") o.blockMillis = atof(v);
    else if (a == "-blocks") o.blocks = atoi(v);
    else if (a == "-graph-ops") o.graphOps = atoi(v);
    else if (a == "-check") o.check = parseSize(v);
    else if (a == "-limit") o.limit = atof(v);
    else if (a == "-watchdog") o.watchdog = atof(v);
    else if (a == "-seconds") o.seconds = atof(v);
    else if (a == "-gemm-size") o.gemmSize = atoi(v);
    else die("%s: no such option (the head of nccl.cu lists them)", argv[i - 1]);
  }
  if (o.gemm && !o.sizesGiven) o.begin = o.end = size_t(256) << 20;
  if (o.begin < 4 || o.end < o.begin || o.factor < 2) die("-b, -e, -f: want 4 <= b <= e and a factor of at least 2");
  if (o.blockMillis <= 0 || o.blocks < 1 || o.graphOps < 1 || o.watchdog <= 0 || o.gemmSize < 16) die("-block-ms, -blocks, -graph-ops, -watchdog and -gemm-size must be positive");
  return o;
}
