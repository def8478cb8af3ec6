//! Gateway group benchmark: cost of a large group that shares all VIPs, for the policy server and for each gateway,
//! which holds the shards of all VIPs in memory and recomputes their owners when a gateway fails or returns.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use tempfile::TempDir;
use vipgate::peer::proto::{Direction, Fate, Half, Session};
use vipgate::source::manifest_files::compile_files;
use vipgate::xds::publication::Publication;
use vipgate::xds::resource::{Kind, encode_all};
use vipgate::xds::store::ResourceStore;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::members::{Authentication, MemberSpec, MembersSpec, PolicyRelease};
use vipgate_dataplane::policy::spec::NetworkSpec;
use vipgate_policy::compiler::{GatewayLocality, Placement};
use vipgate_policy::manifest::UnsupportedKinds;

use super::churn::{endpoint_address, vip_address};
use super::{PolicySize, print_result};
use crate::path::{median, round2};

/// Failures and returns to measure; the median is reported.
const ITERATIONS: usize = 11;
/// Services per file.
const SERVICES_PER_FILE: u32 = 500;

/// Options of `vipgate-bench policy group`.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Gateways, all of which announce all VIPs
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=256))]
    gateways: u32,
    #[command(flatten)]
    size: PolicySize,
    /// Print one JSON object on one line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    gateways: u32,
    vips: u32,
    endpoints: u32,
    /// At the policy server: time from manifests to placement.
    compile_ms: f64,
    /// Size of the policy sent to each gateway, and of the VIP resources with their shards per VIP.
    policy_mb: f64,
    bytes_per_vip: f64,
    /// At a gateway: time to build the snapshot, and its memory.
    build_ms: f64,
    memory_mb: f64,
    /// Time until every shard has an owner after a gateway fails, and after it returns.
    failure_ms: f64,
    return_ms: f64,
    /// Size of a session record on a replication link, without TLS overhead.
    record_bytes: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} gateways, {} VIPs shared by all, {} endpoints", self.gateways, self.vips, self.endpoints)?;
        writeln!(f, "  policy server: compiled in {} ms", self.compile_ms)?;
        writeln!(f, "  policy: {} MB, {} bytes per VIP", self.policy_mb, self.bytes_per_vip)?;
        writeln!(f, "  gateway: built in {} ms, {} MB", self.build_ms, self.memory_mb)?;
        writeln!(f, "  failure of a gateway: {} ms; its return: {} ms", self.failure_ms, self.return_ms)?;
        write!(f, "  session record: {} bytes", self.record_bytes)
    }
}

/// Runs the benchmark and prints the report.
pub(super) fn run(options: &Options) -> Result<()> {
    let directory = TempDir::new()?;
    let Options { gateways, size: PolicySize { vips, endpoints }, json } = *options;
    let manifests = write_manifests(directory.path().join("manifests"), options)?;
    let start = Instant::now();
    let (placement, _) = compile_files(&[manifests], UnsupportedKinds::Ignore).accept()?;
    let compile_ms = milliseconds_since(start);
    let resources = encode_all(&placement);
    let bytes = |selected: &dyn Fn(Kind) -> bool| -> usize {
        resources.iter().filter(|(key, _)| selected(key.kind)).map(|(_, content)| content.body.len()).sum()
    };
    let (policy_bytes, vip_bytes) = (bytes(&|_| true), bytes(&|kind| kind == Kind::Vip));
    drop(resources);
    let policy = policy_of(placement, "gw-0")?;

    let before = resident_mb()?;
    let start = Instant::now();
    let mut builder = Builder::new(NetworkSpec::default());
    let snapshot = builder.with_change(&policy)?;
    let build_ms = milliseconds_since(start);
    let memory_mb = resident_mb()? - before;
    ensure!(snapshot.policy.vips().count() == vips as usize, "VIPs are missing in the snapshot");
    drop(snapshot);
    let (mut failures, mut returns) = (Vec::new(), Vec::new());
    builder.with_members(&membership(gateways, None));
    for iteration in 0..ITERATIONS {
        let victim = 1 + iteration as u32 % (gateways - 1);
        for (failed, times) in [(Some(victim), &mut failures), (None, &mut returns)] {
            let start = Instant::now();
            let snapshot = builder.with_members(&membership(gateways, failed));
            times.push(milliseconds_since(start));
            drop(snapshot);
        }
    }
    let [failure_ms, return_ms] = [failures, returns].map(|times| round2(median(times)));
    let report = Report {
        benchmark: "policy group",
        gateways,
        vips,
        endpoints,
        compile_ms: round2(compile_ms),
        policy_mb: round2(policy_bytes as f64 / 1e6),
        bytes_per_vip: round2(vip_bytes as f64 / f64::from(vips)),
        build_ms: round2(build_ms),
        memory_mb: round2(memory_mb),
        failure_ms,
        return_ms,
        record_bytes: record_bytes(),
    };
    print_result(&report, json)
}

/// A gateway's policy, as it gets it from a server.
fn policy_of(placement: Placement, gateway: &str) -> Result<PolicyChange> {
    let (nothing, mut store) = (Publication::default(), ResourceStore::default());
    let published = nothing.next(placement.into()).context("nothing is published")?;
    store.stage_resources(published.stored(published.changed_since(&nothing)))?;
    Ok(store.update_for(&GatewayLocality::named(gateway)).change)
}

/// Membership in which all gateways but `failed` are active.
fn membership(gateways: u32, failed: Option<u32>) -> MembersSpec {
    let member = |number: u32| MemberSpec {
        name: gateway_name(number).into(),
        tunnel: format!("10.2.0.{}:4790", number + 1).parse().ok(),
        active: Some(number) != failed,
        connected: Some(number) != failed && number != 0,
        may_open: true,
        policy_release: PolicyRelease::NotAwaited,
        authentication: Authentication::None,
    };
    MembersSpec {
        this: Some(gateway_name(0).into()),
        gateways: (0..gateways).map(member).collect(),
        ..MembersSpec::default()
    }
}

fn gateway_name(number: u32) -> String {
    format!("gw-{number}")
}

/// Writes manifests of the gateways, and of Services whose VIPs all of them announce.
fn write_manifests(directory: PathBuf, options: &Options) -> Result<PathBuf> {
    let Options { gateways, size: PolicySize { vips, endpoints }, .. } = *options;
    fs::create_dir(&directory)?;
    let mut text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: bench}\n".to_owned();
    for number in 0..gateways {
        write!(
            text,
            "---\napiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {{name: {}}}\n\
             spec: {{peerAddress: 10.2.{}.{}}}\n",
            gateway_name(number),
            number / 250,
            number % 250 + 1
        )?;
    }
    fs::write(directory.join("gateways.yaml"), &text)?;
    for first in (0..vips).step_by(SERVICES_PER_FILE as usize) {
        text.clear();
        for vip in first..vips.min(first + SERVICES_PER_FILE) {
            let pods: Vec<String> = (vip..endpoints)
                .step_by(vips as usize)
                .map(|pod| format!("{{addresses: [{}], conditions: {{ready: true}}}}", endpoint_address(pod)))
                .collect();
            write!(
                text,
                "---\napiVersion: v1\nkind: Service\n\
                 metadata: {{name: s-{vip}, namespace: bench, annotations: \
                 {{vipgate.io/egress: \"true\", vipgate.io/announce: BGP}}}}\n\
                 spec: {{type: LoadBalancer, ports: [{{name: http, port: 80, targetPort: 8080, protocol: TCP}}]}}\n\
                 status: {{loadBalancer: {{ingress: [{{ip: {}}}]}}}}\n\
                 ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {{name: s-{vip}-0, namespace: bench, labels: {{kubernetes.io/service-name: s-{vip}}}}}\n\
                 addressType: IPv4\nports: [{{name: http, port: 8080, protocol: TCP}}]\nendpoints: [{}]\n",
                vip_address(vip),
                pods.join(", ")
            )?;
        }
        fs::write(directory.join(format!("services-{first}.yaml")), &text)?;
    }
    Ok(directory)
}

/// Encoded size of a typical session record.
fn record_bytes() -> usize {
    let direction_state = Half {
        flags: 0x35,
        idle_ms: 40,
        sequence: 0x1234_5678,
        acknowledged: 0x8765_4321,
        packets: 12,
        ..Half::default()
    };
    let session = Session {
        fate: Fate::Open.into(),
        direction: Direction::Egress.into(),
        origin: vec![1; 13],
        translated: vec![1; 13],
        first: Some(direction_state),
        second: Some(direction_state),
    };
    prost::Message::encoded_len(&session)
}

fn milliseconds_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Resident memory of this process.
fn resident_mb() -> Result<f64> {
    let text = fs::read_to_string("/proc/self/statm").context("cannot read /proc/self/statm")?;
    let pages = text.split(' ').nth(1).and_then(|word| word.parse::<f64>().ok());
    Ok(pages.context("cannot parse /proc/self/statm")? * 4096.0 / 1e6)
}
