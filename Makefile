# Lockstep. `make demo` shows it, `make test` proves it.
SHELL   := /bin/bash
GO      ?= go
VERSION := $(shell cat VERSION)+$(shell git describe --always --dirty --exclude "*" 2>/dev/null || echo devel)
LDFLAGS := -s -w -X github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/buildinfo.version=$(VERSION) \
           -X github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/buildinfo.revision=$(shell git rev-parse HEAD 2>/dev/null)
CACHE   := $(shell $(GO) env GOCACHE)/../lockstep
LINT    := $(CACHE)/golangci-lint-$(shell sha256sum tools/golangci/go.sum | cut -c1-12)

# Packages with goroutines or shared memory run under the race detector too.
RACE := ./record ./windowmon ./fence ./pathplan/probe ./pathplan/service ./preflight ./diagnosis ./diagnosis/replay ./ccl/... ./collector/... ./exporters/... ./remediation/... ./deploy/... ./cmd/...
# The tests of these run GPU kernels on CPU threads, which takes all cores: one package at a time.
KERNELS := ./ccl ./ccl/internal/cuda/kernels
# These have tests that need RDMA devices.
RDMA   := ./ccl/internal/verbs ./ccl/internal/nic ./collector/source/rdma ./ccl/internal/rdma ./ccl ./cmd/lockstep
RDMAVM := $(CACHE)/rdmavm
FUZZTIME ?= 120s

.PHONY: help build test race test-outages test-tracing test-slurm packages test-rdma soak-nccl sanitize-nccl lint generate check-generated demo bench bench-diagnosis peers zoo zoo-short properties test-kubernetes test-fabric test-monitoring test-compat test-docs release test-release fuzz man clean
help: ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

# CUDA and NVML are opened at run time, through cgo; go-nvml's header deprecates much of what it declares.
export CGO_CFLAGS := -O2 -g -Wno-deprecated-declarations

build: bin/libnccl-profiler-lockstep.so ## bin/lockstep, and NCCL's profiler plugin beside it
	CGO_ENABLED=1 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/lockstep ./cmd/lockstep

# The plugin is never unloaded (nodelete): threads of NCCL and of its own may be in it.
PLUGIN := $(wildcard nccl/plugin/*.c)
PLUGINFLAGS := -std=gnu11 -O2 -g -ffile-prefix-map=$(CURDIR)=. -fPIC -shared -fvisibility=hidden -Wall -Wextra -Wshadow -Werror -Wl,-z,nodelete,-z,now,-z,relro -Irecord/c -Imarks/c -Inccl/plugin
bin/libnccl-profiler-lockstep.so: $(PLUGIN) $(wildcard nccl/plugin/*.h) record/c/lockstep_record.h marks/c/lockstep_launcher.h
	@mkdir -p bin
	$(CC) $(PLUGINFLAGS) -o $@ $(PLUGIN) -lpthread

test: ## every test
	$(GO) test -count=1 -timeout 20m $$($(GO) list ./... | grep -vxF "$$($(GO) list $(KERNELS))")
	$(GO) test -count=1 -timeout 20m -p 1 $(KERNELS)
	cd bench && $(GO) test -count=1 ./...

race: ## the tests of what runs concurrently, under the race detector
	$(GO) test -race -short -count=1 -timeout 20m $$($(GO) list $(RACE) | grep -vxF "$$($(GO) list $(KERNELS))")
	$(GO) test -race -short -count=1 -timeout 20m ./ccl # of KERNELS the only one with goroutines: the rest is C, which the detector does not see

test-outages: ## long outages and heavy losses of a network between two nodes: minutes
	$(GO) test -count=1 -timeout 20m -run 'TestOutage' -v ./ccl -args -outages

test-fabric: ## C4P on a fabric of network namespaces: root, a quiet machine, about half an hour
	LOCKSTEP_TEST_FABRIC=1 $(GO) test -count=1 -timeout 60m -v ./deploy/fabric

test-tracing: ## traces of real ranks in a real Jaeger, which takes about five minutes of two cores to build once
	LOCKSTEP_TEST_TRACING=1 $(GO) test -count=1 -timeout 20m -run 'TestTracing' -v ./deploy/local ./cmd/lockstep

test-slurm: ## faults and kills on a real Slurm of this machine (Debian's slurmctld, slurmd, slurm-client, munge; root); ROUNDS=10: half an hour
	LOCKSTEP_TEST_SLURM=$(or $(ROUNDS),2) $(GO) test -count=1 -timeout 60m -run TestReal -v ./remediation/slurm ./deploy/slurm

.PHONY: test-demo-slurm test-demo-kubernetes
test-demo-slurm: build ## `lockstep demo --on slurm`, once with each fault, on a real Slurm of this machine (as test-slurm; FAULTS, JSON=FILE, ROUNDS=10, OPTIONS=--requeue)
	ROUNDS=$(ROUNDS) OPTIONS=$(OPTIONS) deploy/slurmlab/demo bin/lockstep $(FAULTS)

test-demo-kubernetes: ## `lockstep demo --on kubernetes`, once with each fault, on five real kubelets (as test-kubernetes; FAULTS, JSON=FILE)
	deploy/kubelab/build
	CGO_ENABLED=0 $(GO) build -o bin/lockstep-static ./cmd/lockstep
	deploy/kubelab/up && { deploy/kubelab/demo bin/lockstep-static $(FAULTS); s=$$?; deploy/kubelab/down; exit $$s; }

# The same bytes for the same commit: no time but the commit's, no path of this machine.
NFPM := $(CACHE)/nfpm-$(shell sha256sum tools/nfpm/go.sum | cut -c1-12)
packages: build $(NFPM) ## .deb and .rpm, in dist
	@mkdir -p dist
	for p in deb rpm; do PKGARCH=$$($(GO) env GOARCH) PKGVERSION=$$(echo $(VERSION) | sed -E '/^v?[0-9]+\./!s/^/0.0.0+/; s/^v//; s/-/./g') \
	  SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	  $(NFPM) package -f deploy/packages/nfpm.yaml -p $$p -t dist/ || exit 1; done

$(NFPM):
	@echo 'building nfpm, once'; mkdir -p $(CACHE)
	cd tools/nfpm && $(GO) build -o $(NFPM) github.com/goreleaser/nfpm/v2/cmd/nfpm

.PHONY: test-page
test-page: ## the status page in a real Chromium (Debian: chromium), also beside the demo's faults; ARGS=-images writes docs/images and docs/demo.md anew
	LOCKSTEP_TEST_PAGE=1 $(GO) test -count=1 -timeout 20m -run 'Page|Links' -v ./exporters/web $(if $(ARGS),-args $(ARGS))
	LOCKSTEP_TEST_PAGE=1 $(GO) test -count=1 -timeout 30m -run TestPageBeside -v ./cmd/lockstep $(if $(ARGS),-args $(ARGS))

# The packages are Grafana's own, from npm: about 470 MB, once.
RENDER := $(CACHE)/grafana-render-$(shell sha256sum dashboards/render/package-lock.json | cut -c1-12)
.PHONY: test-dashboards-render
test-dashboards-render: $(RENDER)/node_modules ## dashboards of two configurations drawn by Grafana's own components in a real Chromium (Debian: chromium, nodejs, npm); ARGS=-only=job-demo one of them, ARGS=-images docs/images anew
	LOCKSTEP_TEST_RENDER=$(RENDER)/node_modules $(GO) test -count=1 -timeout 30m -run TestDashboardsInChromium -v ./cmd/lockstep $(if $(ARGS),-args $(ARGS))

$(RENDER)/node_modules:
	rm -rf $(RENDER) && mkdir -p $(RENDER)/new && cp dashboards/render/package*.json $(RENDER)/new
	cd $(RENDER)/new && npm ci --ignore-scripts --no-audit --no-fund
	mv $(RENDER)/new/node_modules $@

test-rdma: ## the tests that need RDMA devices, in a virtual machine that has them
	rm -rf $(RDMAVM)/tests && mkdir -p $(RDMAVM)/tests
	files=(); for p in $(RDMA); do t=$${p#./}; t=$${t//\//-}.test; \
	  CGO_ENABLED=1 $(GO) test -c -o $(RDMAVM)/tests/$$t $$p && files+=(-file $(RDMAVM)/tests/$$t:test/$$t) || exit 1; done; \
	for s in cmd/lockstep/testdata/rdma/*; do files+=(-file $$s:test/testdata/rdma/$${s##*/}); done; \
	for boot in 1 2; do status=0; deploy/rdmavm/run -t 1200 -out $(RDMAVM)/results "$${files[@]}" -- deploy/rdmavm/suite || status=$$?; \
	  [ $$status = 126 ] || break; done; exit $$status # a kernel that locked up is not what is tested: once more
	$(MAKE) test-rdma-steady

.PHONY: test-rdma-steady
test-rdma-steady: ## of test-rdma what watches speeds: a rail that others disturb, that is slow, or that loses packets; whatever else the machine does
	mkdir -p $(RDMAVM)/steady && CGO_ENABLED=1 $(GO) test -c -o $(RDMAVM)/steady/ccl.test ./ccl
	deploy/rdmavm/run -steady -t 300 -out $(RDMAVM)/results-steady -file $(RDMAVM)/steady/ccl.test:test/ccl.test -- deploy/rdmavm/suite TestSteady

test-kubernetes: ## the Kubernetes actuator on five real kubelets with JobSet, which take 12 CPU-minutes to build once; needs root
	deploy/kubelab/build
	LOCKSTEP_TEST_KUBERNETES=1 LOCKSTEP_TEST_KUBERNETES_RUNS=$(or $(RUNS),3) $(GO) test -count=1 -timeout 60m -run TestLab -v ./remediation/kubernetes

.PHONY: test-kwok
test-kwok: ## the remediator on 1,000 nodes of KWOK under a real control plane: 200 random faults over simulated days (FAULTS, SEED, MINUTES), or KILLS=50 of remediator, API server, master and agent; no root; builds for 15 CPU-minutes once, runs for about an hour
	lab=$$(KWOK=1 deploy/kubelab/build) && \
	  LOCKSTEP_TEST_KWOK=$$lab/bin LOCKSTEP_TEST_KWOK_FAULTS=$(or $(FAULTS),200) LOCKSTEP_TEST_KWOK_SEED=$(or $(SEED),17) LOCKSTEP_TEST_KWOK_MINUTES=$(or $(MINUTES),0) LOCKSTEP_TEST_KWOK_KILLS=$(or $(KILLS),0) \
	  $(GO) test -count=1 -timeout 3h -run TestKWOK -v ./remediation/kubernetes

.PHONY: test-kills
test-kills: ## remediator, API server, master and agent killed in the middle of actions, 50 times each (KILLS, SEED), on an API server that checks versions; about five minutes
	LOCKSTEP_TEST_KILLS=$(or $(KILLS),50) LOCKSTEP_TEST_KILLS_SEED=$(or $(SEED),1) $(GO) test -count=1 -timeout 2h -run 'TestKills$$' -v ./remediation/kubernetes

soak-nccl: ## 100 million events through the NCCL plugin, a reader following: memory flat, nothing unaccounted
	LOCKSTEP_NCCL_SOAK=100000000 $(GO) test -count=1 -timeout 60m -run TestSoak -v ./nccl

sanitize-nccl: ## every scene of the NCCL driver under ASan, UBSan and TSan, and millions of arbitrary calls
	LOCKSTEP_NCCL_LONG=1 $(GO) test -count=1 -timeout 60m -run 'TestSanitizers|TestAnyCalls' -v ./nccl

lint: format $(LINT) ## gofmt, go vet, golangci-lint with the import direction
	$(GO) vet ./...
	$(LINT) run ./...

.PHONY: format
format: ## fail when gofmt would change a file
	@test -z "$$(gofmt -l . | tee /dev/stderr)" || { echo 'run gofmt -w on these'; exit 1; }

$(LINT):
	@echo 'building golangci-lint, once'; mkdir -p $(CACHE)
	cd tools/golangci && $(GO) build -o $(LINT) github.com/golangci/golangci-lint/v2/cmd/golangci-lint

generate: ## everything that is generated and committed
	$(GO) generate ./...

check-generated: generate ## fail when a generated file is stale
	@git diff --exit-code --stat || { echo 'generated files were stale: commit the result of make generate'; exit 1; }

demo: build ## the whole loop on this machine; break things and watch (^C ends it)
	bin/lockstep demo $(ARGS)

bench: build ## every budget: NAME value unit budget ratio ok|OVER
	cd bench && $(GO) run ./cmd/budgets -lockstep ../bin/lockstep

peers: build ## our collectives beside OpenMPI's, in turn
	cd bench && $(GO) run ./cmd/peers -lockstep ../bin/lockstep

# Namespaces of the network need root; without them the runs are skipped, and said to be.
zoo: build ## the real zoo: 13 jobs, faults from outside, verdicts scored; about 75 minutes
	cd bench && $(GO) build -o ../bin/zoo ./cmd/zoo && ../bin/zoo -lockstep ../bin/lockstep -runs 320 -seed $(or $(SEED),1) $(ARGS)

ZOOSHORT := none,none_load,kill9,exit3,stop,node_cut,agent_restart,pair_outage3s,pair_slow,slow2,starve8,bug_swap
zoo-short: build ## a part of it, within 4 minutes
	cd bench && $(GO) build -o ../bin/zoo ./cmd/zoo && ../bin/zoo -lockstep ../bin/lockstep -faults $(ZOOSHORT) -runs 14 -limit 185s -seed $(or $(SEED),1) $(ARGS)

properties: ## what must hold of verdicts on random jobs, on many more of them and other ones each time
	LOCKSTEP_PROPERTIES=1 $(GO) test -count=1 -timeout 60m -run 'Any|Healthy' ./diagnosis -rapid.checks=5000 -rapid.nofailfile

fuzz: ## every fuzz target for FUZZTIME
	@for p in $$($(GO) list ./...); do d=$$($(GO) list -f '{{.Dir}}' $$p); \
	  for f in $$(grep -hoE '^func Fuzz[A-Za-z0-9_]+' $$d/*_test.go 2>/dev/null | cut -c6-); do \
	    echo "== $$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p || exit 1; done; done

.PHONY: bench-diagnosis
bench-diagnosis: ## verdicts on simulated jobs with injected faults, and what a pass costs by size (ARGS=-short: a minute)
	cd bench && $(GO) run ./cmd/diagnosis -set report $(ARGS)
	cd bench && $(GO) run ./cmd/diagnosis -scale

man: build ## manual pages of every command, in bin/man1
	bin/lockstep man --dir bin/man1

.PHONY: bad-links
bad-links: ## 1 to 3 dead or lossy links in PLACES (100) random places each: planner and probers find them, and blame no other; minutes
	PATHPLAN_TEST_PLACES=$(or $(PLACES),100) $(GO) test -count=1 -timeout 60m -v -run TestBadLinks ./pathplan/service

.PHONY: bench-auth
bench-auth: ## what authentication costs a report: latency and CPU without, by the socket's owner, with mutual TLS; 90 s
	$(GO) test -run '^$$' -bench Report -benchtime 40x ./collector/agent

.PHONY: bench-fabric
bench-fabric: ## C4P's tables in a simulated fabric, and how the plan grows to 4,096 hosts (ARGS=-short: seconds)
	cd bench && $(GO) run ./cmd/fabricsim $(ARGS)

test-monitoring: ## rules, routes and dashboards of two configurations under promtool, amtool, Alertmanager and the operator's schema
	LOCKSTEP_TEST_MONITORING=1 $(GO) test -count=1 -timeout 20m -v ./cmd/lockstep/internal/monitoring

test-compat: build ## this build's agents, masters and ranks with those of another commit (OLD=REVISION, by default the last release or the first commit of the former layout)
	deploy/compat/run bin/lockstep $(OLD)

test-docs: ## each example of the documents and of each help, run to its end on a fresh root; the README's Go program
	LOCKSTEP_TEST_EXAMPLES=1 $(GO) test -count=1 -timeout 20m -run 'TestDocuments|TestExamples|TestHelp|TestAttach' -v ./cmd/lockstep

release: ## archives for amd64 and arm64 with checksums and SBOMs, in dist/
	$(GO) run ./deploy/release -o dist

test-release: ## builds everything twice, in two places with two caches: the same bits
	LOCKSTEP_TEST_RELEASE=1 $(GO) test -count=1 -timeout 60m -run TestTwoBuilds -v ./deploy/release

# The images' digests follow from the archives; -gpu holds the C library that its program was linked with.
.PHONY: images
images: ## OCI images of both kinds as one OCI layout, and their digests, in dist/ (NAME=registry.example.com/lockstep; Debian)
	rm -rf dist/images && mkdir -p dist/images
	$(GO) run ./deploy/release -o dist/images
	cd dist/images && apt-get download -q libc6=$$(dpkg-query -W -f '$${Version}' libc6) >/dev/null
	$(GO) run ./deploy/images -from dist/images -o dist -name $(or $(NAME),lockstep) -libc dist/images/libc6_*.deb

# helm takes three minutes of a core to build once. CI reads what the charts rendered to.
HELM := $(CACHE)/helm-$(shell sha256sum tools/helm/go.sum | cut -c1-12)
.PHONY: test-hosts
test-hosts: ## `lockstep run` on several hosts: supervisors killed 50 times, random faults in 2,000 jobs of virtual time
	LOCKSTEP_TEST_KILLS=50 $(GO) test -count=1 -timeout 20m ./remediation/process -run 'TestHosts|TestGroup' -v -rapid.checks=2000 $(ARGS)

.PHONY: test-chart
test-chart: $(HELM) ## the Helm charts under the real helm: lint, every file of values rendered, bad ones refused (ARGS=-update)
	LOCKSTEP_TEST_CHART=$(HELM) $(GO) test -count=1 -timeout 10m ./deploy/helm $(ARGS)

.PHONY: test-chart-kubernetes
test-chart-kubernetes: $(HELM) ## both charts on six real kubelets, with real ranks, Prometheus and Alertmanager: seven faults, verdict, alert, action, running again (RUNS=10, FAULTS="node_cut ..."), or KILLS=50 of remediator, master, agents and API server in the middle of random faults; uninstalled beside the job; needs root
	deploy/kubelab/build
	rm -rf dist/lab && mkdir -p dist/lab && $(GO) run ./deploy/release -o dist/lab -only $$($(GO) env GOARCH)
	$(GO) run ./deploy/images -from dist/lab -o dist/lab -name localhost/lockstep
	tar -xzf dist/lab/lockstep_*_linux_*.tar.gz -C dist/lab --strip-components 1
	LOCKSTEP_TEST_HELM=$(HELM) LOCKSTEP_TEST_PROGRAM=$(CURDIR)/dist/lab/lockstep LOCKSTEP_TEST_IMAGES=$$(echo $(CURDIR)/dist/lab/lockstep_*_images.tar) LOCKSTEP_TEST_VERSION=$$(tr + - <VERSION) \
	  RUNS=$(RUNS) FAULTS="$(FAULTS)" KILLS=$(KILLS) SEED=$(SEED) $(GO) test -count=1 -timeout 3h -run 'TestChart$(if $(KILLS),Kills)$$' -v ./deploy/kubelab

$(HELM):
	@echo 'building helm, once'; mkdir -p $(CACHE)
	cd tools/helm && CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(HELM) helm.sh/helm/v4/cmd/helm

clean: ## remove what was built
	rm -rf bin
