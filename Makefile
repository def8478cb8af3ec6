# What people and CI run. `make` alone lists it.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# Debian packages, and a file or command by which each is known to be there.
PACKAGES := clang:clang llvm:llc libbpf-dev:/usr/include/bpf/bpf_helpers.h \
  libelf-dev:/usr/include/libelf.h zlib1g-dev:/usr/include/zlib.h m4:m4 pkg-config:pkg-config gcc:gcc g++:g++ \
  iproute2:ip ethtool:ethtool iputils-ping:ping procps:sysctl tcpdump:tcpdump iperf3:iperf3 python3-minimal:python3 util-linux:setpriv nftables:nft \
  protobuf-compiler:protoc libprotobuf-dev:/usr/include/google/protobuf/descriptor.proto etcd-server:etcd etcd-client:etcdctl nginx-light:nginx curl:curl \
  bird2:bird faketime:faketime frr:/usr/lib/frr/bgpd prometheus:prometheus nfdump:nfcapd dpkg-dev:dpkg-shlibdeps \
  python3-grpcio:/usr/lib/python3/dist-packages/grpc/__init__.py python3-protobuf:/usr/lib/python3/dist-packages/google/protobuf/__init__.py
CARGO_DENY := 0.20.2

.PHONY: help deps deny build demo test fmt lint unit loom miri fuzz doc e2e e2e-gateways e2e-server e2e-starts bench bench-watch bench-wire bench-flood soak bench-neighbor bench-policy bench-gateways clean-lab

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | awk -F: '{printf "  make %-13s%s\n", $$1, $$2}'

deps: ## install what is missing, and say what
	@missing=""; \
	for pair in $(PACKAGES); do \
	  name=$${pair%%:*}; sign=$${pair#*:}; \
	  case $$sign in /*) [ -e $$sign ] ;; *) command -v $$sign >/dev/null || [ -x /sbin/$$sign ] || [ -x /usr/sbin/$$sign ] ;; esac \
	    || missing="$$missing $$name"; \
	done; \
	if [ -n "$$missing" ]; then \
	  echo "installing from Debian:$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
	@command -v cargo >/dev/null || { echo "Rust is missing: install it with rustup (https://rustup.rs), then try again"; exit 1; }

build: deps ## build the release binaries: target/release/vipgate and vipgate-bench
	cargo build --release --locked -p vipgate -p vipgate-bench --bins

demo: build ## build, then show it working in network namespaces
	target/release/vipgate demo

.PHONY: deb deb-try
deb: build ## a Debian package of the release binary, in target/
	packaging/deb.sh target/release/vipgate target/

deb-try: deb ## install the package in an overlay, look at it, and purge it; needs root
	packaging/deb-try.sh "$$(ls -t target/vipgate_*.deb | head -1)"

test: deps fmt-check lint deny unit loom fuzz doc e2e ## everything that CI runs

.PHONY: fmt-check
fmt-check:
	cargo fmt --all --check

fmt: ## format the code
	cargo fmt --all

lint: deps ## clippy, warnings are errors
	cargo clippy --workspace --all-targets --locked -- -D warnings

deny: deps ## licences and sources of dependencies
	@cargo deny --version >/dev/null 2>&1 || { echo "installing cargo-deny from crates.io"; CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --quiet --locked cargo-deny@$(CARGO_DENY); }
	cargo deny --locked check licenses bans sources

# Features of libraries follow from what is selected: always the whole workspace, so that each is built once.
TEST := cargo test --locked --workspace
UNIT_TESTS = $(patsubst %.rs,--test %,$(notdir $(patsubst %/main.rs,%.rs,\
  $(wildcard $(foreach folder,dataplane dataplane/mem dataplane/xdp control bench,$(folder)/tests/*.rs $(folder)/tests/*/main.rs)))))

unit: deps ## unit, property and scenario tests without namespaces
	$(TEST) --lib --bin vipgate --bin vipgate-bench $(UNIT_TESTS)

loom: deps ## lock-free code under every order in which threads can run
	cargo test --locked --quiet -p vipgate-dataplane --features loom --lib -- held:: every_order::

# Interpreted, all is a thousand times slower: these tests use every kind of unsafe code that isn't a system call.
MIRI = CARGO_TARGET_DIR=target/miri RUSTFLAGS=-Adeprecated cargo +nightly miri test --locked --quiet

miri: deps ## frames, tags and a part of the engine under Miri; needs rustup, and takes some minutes
	rustup toolchain install nightly --profile minimal --component miri --component rust-src >/dev/null 2>&1
	$(MIRI) -p vipgate-mem -- --skip region:: --skip slab::
	$(MIRI) -p vipgate-dataplane --test engine -- hairpin:: neighbours:: workers::a_flow workers::a_reply

# Coverage for libFuzzer, which links with stable Rust; build scripts are left out by naming the target.
FUZZ_FLAGS := --cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares
FUZZ_SECONDS ?= 10
FUZZ_TARGETS := frames flows icmp_error peer xds state config manifests filter members admin
# Texts and messages may be longer than packets.
FUZZ_LENGTH_frames := 1000
FUZZ_LENGTH_flows := 1000
FUZZ_LENGTH_icmp_error := 1000
FUZZ_DICTIONARY_config := -dict=fuzz/words.dict
FUZZ_DICTIONARY_manifests := -dict=fuzz/words.dict
FUZZ_DICTIONARY_filter := -dict=fuzz/words.dict
HOST = $(shell rustc -vV | sed -n 's/^host: //p')

.PHONY: fuzz-build fuzz-long
fuzz-build: deps
	CARGO_TARGET_DIR=target/fuzz RUSTFLAGS="$(FUZZ_FLAGS)" \
	  cargo build --profile fuzz -p vipgate-fuzz --bins --locked --quiet --target $(HOST)

# An input that takes 30 s or 2 GB, at once or all together, is a fault, too.
fuzz: fuzz-build ## fuzz each target of FUZZ_TARGETS for FUZZ_SECONDS=10; what fails is kept in target/fuzz
	@$(foreach target,$(FUZZ_TARGETS),\
	  mkdir -p target/fuzz/found/$(target); echo "fuzzing $(target) for $(FUZZ_SECONDS) s"; \
	  target/fuzz/$(HOST)/fuzz/$(target) -max_total_time=$(FUZZ_SECONDS) -max_len=$(or $(FUZZ_LENGTH_$(target)),4000) -timeout=30 \
	    -rss_limit_mb=2048 $(FUZZ_DICTIONARY_$(target)) -artifact_prefix=target/fuzz/$(target)- \
	    target/fuzz/found/$(target) fuzz/corpus/$(target) >target/fuzz/$(target).log 2>&1 \
	    || { tail -40 target/fuzz/$(target).log; exit 1; }; \
	  tail -1 target/fuzz/$(target).log;)

fuzz-long: ## the same for an hour each, all day
	@$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=3600

doc: deps ## the documentation, warnings are errors
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

# Cargo builds the program for the tests of its package; on its own it would be built with other features, and all libraries again.
BINARY = $(TEST) --no-run --test admin

# Those that are a file each know nothing of where policy comes from; those in folders say it themselves.
E2E_EITHER = $(patsubst tests/tests/%.rs,--test %,$(wildcard tests/tests/*.rs))
E2E_FOLDERS = $(patsubst tests/tests/%/main.rs,--test %,$(filter-out tests/tests/gateways/main.rs,$(wildcard tests/tests/*/main.rs)))
# Where policy comes from matters to these above all; `make e2e-server` has them all.
E2E_SERVER = $(patsubst %,--test %,egress input policy restart services)
# Of several gateways, what the engine's own tests can't show; `make e2e-gateways` has them all.
E2E_GATEWAYS = connections::ten_thousand_connections_over_three_gateways killed::a_killed_gateway absent::a_stopped_gateway \
  partition::a_partition drained::a_drain lossy::lossy_replication strangers::forged_tunnel_packets_are_dropped_and_counted \
  claimed::one_gateway_has_a_claimed_vip_and_the_next_one_says_so_within_a_second \
  links::a_dead_outside_link links::a_dead_router_behind_a_live_link \
  started::no_question_is_answered_by_two_gateways_that_start

e2e: deps ## whole gateways in network namespaces, with policy from files and from a server; needs root
	$(BINARY)
	VIPGATE_POLICY=files $(TEST) $(E2E_EITHER) $(E2E_FOLDERS) -- --test-threads=1
	$(TEST) --test gateways -- --test-threads=1 --exact $(E2E_GATEWAYS)
	VIPGATE_POLICY=server $(TEST) $(E2E_SERVER) -- --test-threads=1

e2e-server: deps ## every scenario of one gateway with policy from a server, four minutes; needs root
	$(BINARY)
	VIPGATE_POLICY=server $(TEST) $(E2E_EITHER) -- --test-threads=1

e2e-gateways: deps ## every scenario of several gateways, eight minutes; needs root
	$(BINARY)
	$(TEST) --test gateways -- --test-threads=1

e2e-starts: deps ## two hundred pairs of gateways start, and are asked who has a VIP all along, fifteen minutes; needs root
	$(BINARY)
	VIPGATE_PAIRS=200 $(TEST) --test gateways -- --nocapture --exact started::no_question_is_answered_by_two_gateways_that_start

# How long the soak takes, and where its chance begins; empty: at the clock.
SOAK_MINUTES ?= 30
SOAK_SEED ?=

soak: deps ## gateways, server, cables, clocks and policy fail at random under load for SOAK_MINUTES=30, from SOAK_SEED; needs root and a quiet machine
	$(BINARY)
	SOAK_MINUTES=$(SOAK_MINUTES) SOAK_SEED=$(SOAK_SEED) $(TEST) --test soak

bench: build ## the packet path alone
	target/release/vipgate-bench path --sessions 1000,65536,1048576

bench-wire: build ## whole gateways over veth, vipgate and nftables; needs root and a quiet machine
	target/release/vipgate-bench wire --against nft --flows 1000,65536

bench-flood: build ## one tenant while another one's VIP is flooded, each kind of flood in turn, small and large tables; needs root and a quiet machine
	target/release/vipgate-bench flood
	target/release/vipgate-bench flood --ipv6 --capacity 16384

bench-neighbor: build ## first packets to next hops that aren't known yet, vipgate and nftables; needs root and a quiet machine
	target/release/vipgate-bench neighbor

bench-policy: build ## changes of policy, at a gateway, under packets, at a server of many gateways; needs root and a quiet machine
	target/release/vipgate-bench policy effect
	target/release/vipgate-bench policy path
	target/release/vipgate-bench policy server

bench-watch: build ## what captures, the NAT log and top cost packets
	target/release/vipgate-bench watch
	target/release/vipgate-bench open --log

bench-gateways: build ## several gateways: the way to the owner, copies of sessions, tables of 64 gateways, deaths; needs root and a quiet machine
	target/release/vipgate-bench path --sessions 1000,65536,1048576 --direction reply
	target/release/vipgate-bench path --sessions 1000,65536,1048576 --direction tunnel
	target/release/vipgate-bench path --sessions 1000,65536,1048576 --direction tunnel-in
	target/release/vipgate-bench open --copies
	target/release/vipgate-bench policy group
	target/release/vipgate-bench failover

clean-lab: ## remove namespaces that a killed run left behind
	@ip netns list | awk '/^vipgate-/ {print $$1}' | while read -r name; do ip netns pids $$name | xargs -r kill -9; ip netns del $$name; done
