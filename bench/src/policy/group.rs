//! What many gateways that share all VIPs cost each of them, and their policy server: who has what is in every gateway's memory, and a
//! death or a return changes it.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use tempfile::TempDir;
use vipgate::manifest::Foreign;
use vipgate::peer::proto::{Direction, Fate, Half, Session};
use vipgate::policy::{Viewer, compile_files};
use vipgate::xds::resource::{Kind, encode_all};
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::members::{Authentication, MemberSpec, MembersSpec};
use vipgate_dataplane::snapshot::spec::NetworkSpec;

use super::churn::{endpoint_address, vip_address};
use super::{Size, show};
use crate::path::{median, round2};

/// Deaths and returns that are measured; the median is reported.
const TURNS: usize = 11;
/// Services in one file.
const IN_ONE_FILE: u32 = 500;

/// What `vipgate-bench policy group` takes.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Gateways, all of which announce all VIPs
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=255))]
    gateways: u32,
    #[command(flatten)]
    size: Size,
    /// One JSON object on a line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Line {
    benchmark: &'static str,
    gateways: u32,
    vips: u32,
    endpoints: u32,
    /// At the policy server: from manifests to who has what.
    compile_ms: f64,
    /// What every gateway is told, and the part of it that is VIPs with their shares.
    told_mb: f64,
    told_of_a_vip_bytes: f64,
    /// At a gateway: from what it is told to what workers read, and the memory that this takes.
    build_ms: f64,
    memory_mb: f64,
    /// A gateway dies, or comes back: until every share has its owner.
    death_ms: f64,
    return_ms: f64,
    /// A session's news on a link, without what TLS adds.
    news_bytes: usize,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} gateways, {} VIPs shared by all, {} endpoints", self.gateways, self.vips, self.endpoints)?;
        writeln!(f, "  policy server: compiled in {} ms", self.compile_ms)?;
        writeln!(f, "  told: {} MB, {} bytes a VIP", self.told_mb, self.told_of_a_vip_bytes)?;
        writeln!(f, "  gateway: built in {} ms, {} MB", self.build_ms, self.memory_mb)?;
        writeln!(f, "  one dies: {} ms; one comes back: {} ms", self.death_ms, self.return_ms)?;
        write!(f, "  news of a session: {} bytes", self.news_bytes)
    }
}

/// Measures it.
pub(super) fn run(options: &Options) -> Result<()> {
    let folder = TempDir::new()?;
    let Options { gateways, size: Size { vips, endpoints }, json } = *options;
    let files = write(folder.path().join("manifests"), options)?;
    let begin = Instant::now();
    let (deal, _) = compile_files(&[files], Foreign::Ignore).accept()?;
    let compile_ms = milliseconds(begin);
    let resources = encode_all(&deal);
    let bytes = |of: &dyn Fn(Kind) -> bool| -> usize {
        resources.iter().filter(|(key, _)| of(key.kind)).map(|(_, content)| content.body.len()).sum()
    };
    let (told, told_of_vips) = (bytes(&|_| true), bytes(&|kind| kind == Kind::Vip));
    drop(resources);
    let set = deal.part_of(Some(&Viewer::named("gw-0")), "bench");
    drop(deal);

    let before = resident_mb()?;
    let begin = Instant::now();
    let mut builder = Builder::new(NetworkSpec::default());
    let snapshot = builder.with_policy(&set)?;
    let build_ms = milliseconds(begin);
    let memory_mb = resident_mb()? - before;
    ensure!(snapshot.policy.vips().count() == vips as usize, "not all VIPs are there");
    drop(snapshot);
    let (mut deaths, mut returns) = (Vec::new(), Vec::new());
    builder.with_members(&view(gateways, None));
    for turn in 0..TURNS {
        let dead = 1 + turn as u32 % (gateways - 1);
        for (gone, times) in [(Some(dead), &mut deaths), (None, &mut returns)] {
            let begin = Instant::now();
            let snapshot = builder.with_members(&view(gateways, gone));
            times.push(milliseconds(begin));
            drop(snapshot);
        }
    }
    let [death_ms, return_ms] = [deaths, returns].map(|times| round2(median(times)));
    let line = Line {
        benchmark: "policy group",
        gateways,
        vips,
        endpoints,
        compile_ms: round2(compile_ms),
        told_mb: round2(told as f64 / 1e6),
        told_of_a_vip_bytes: round2(told_of_vips as f64 / f64::from(vips)),
        build_ms: round2(build_ms),
        memory_mb: round2(memory_mb),
        death_ms,
        return_ms,
        news_bytes: news(),
    };
    show(&line, json)
}

/// All gateways serve but one.
fn view(gateways: u32, gone: Option<u32>) -> MembersSpec {
    let member = |number: u32| MemberSpec {
        name: name(number).into(),
        tunnel: format!("10.2.0.{}:4790", number + 1).parse().ok(),
        serving: Some(number) != gone,
        linked: Some(number) != gone && number != 0,
        may_open: true,
        authentication: Authentication::None,
    };
    MembersSpec { this: Some(name(0).into()), gateways: (0..gateways).map(member).collect(), ..MembersSpec::default() }
}

fn name(number: u32) -> String {
    format!("gw-{number}")
}

/// Writes manifests: gateways, and Services whose VIPs all of them announce.
fn write(folder: PathBuf, options: &Options) -> Result<PathBuf> {
    let Options { gateways, size: Size { vips, endpoints }, .. } = *options;
    fs::create_dir(&folder)?;
    let mut text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: bench}\n".to_owned();
    for number in 0..gateways {
        write!(
            text,
            "---\napiVersion: vipgate.io/v1alpha1\nkind: Gateway\nmetadata: {{name: {}}}\n\
             spec: {{peerAddress: 10.2.0.{}}}\n",
            name(number),
            number + 1
        )?;
    }
    fs::write(folder.join("gateways.yaml"), &text)?;
    for first in (0..vips).step_by(IN_ONE_FILE as usize) {
        text.clear();
        for vip in first..vips.min(first + IN_ONE_FILE) {
            let behind: Vec<String> = (vip..endpoints)
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
                behind.join(", ")
            )?;
        }
        fs::write(folder.join(format!("services-{first}.yaml")), &text)?;
    }
    Ok(folder)
}

/// Bytes of a usual session's news.
fn news() -> usize {
    let half = Half {
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
        first: Some(half),
        second: Some(half),
    };
    prost::Message::encoded_len(&session)
}

fn milliseconds(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e3
}

/// What this process has in memory.
fn resident_mb() -> Result<f64> {
    let text = fs::read_to_string("/proc/self/statm").context("cannot read /proc/self/statm")?;
    let pages: f64 = text.split(' ').nth(1).and_then(|word| word.parse().ok()).context("cannot understand it")?;
    Ok(pages * 4096.0 / 1e6)
}
