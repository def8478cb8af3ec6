//! `vipgate policy status`: asks a policy server how things stand with each policy.

use std::fmt::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::Format;
use super::output::{self, harmless, span};
use super::show::block_on;
use super::table::{Table, number, word};
use crate::config::PolicyServer;
use crate::failure::Failure;
use crate::xds::client::{connect_watched, explain};
use crate::xds::proto::policy_status_client::PolicyStatusClient;
use crate::xds::proto::{EndpointState, PolicyState, StatusReply, StatusRequest};

/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer, bytes.
const LONGEST: usize = 256 << 20;
/// How often to ask again while waiting.
const PACE: Duration = Duration::from_millis(100);

/// The client of a policy server's status.
pub(super) type StatusClient = PolicyStatusClient<Channel>;

/// Which server to ask.
#[derive(Clone, Debug, Args)]
struct At {
    /// Where the policy server listens
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:18000")]
    server: String,
    #[command(flatten)]
    files: Files,
}

/// What a connection to it needs.
#[derive(Clone, Debug, Args)]
pub(super) struct Files {
    /// Authorities that may sign the server's certificate (PEM); default: the system's
    #[arg(long, value_name = "FILE")]
    pub(super) ca: Option<PathBuf>,
    /// Certificate to present (PEM)
    #[arg(long, value_name = "FILE", requires = "key")]
    pub(super) cert: Option<PathBuf>,
    /// The key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub(super) key: Option<PathBuf>,
}

/// Which server to ask, what, and how to show the answer.
#[derive(Clone, Debug, Args)]
pub(super) struct AskServer {
    #[command(flatten)]
    at: At,
    /// Show this endpoint: its policy, and where that is in force; may be given more than once
    #[arg(long = "endpoint", value_name = "ADDR")]
    endpoints: Vec<IpAddr>,
    /// Wait so many seconds until all that is shown is in force on every connected gateway that it is for; if it isn't, fail
    #[arg(long, value_name = "SECONDS")]
    wait: Option<u64>,
    /// How to show the answer
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub(super) fn status(ask: &AskServer) -> Result<(), Failure> {
    let reply = block_on(async {
        let until = ask.wait.map(|seconds| Instant::now() + Duration::from_secs(seconds));
        loop {
            let reply = fetch(ask).await?;
            match until {
                Some(until) if !is_settled(ask, &reply) && Instant::now() < until => tokio::time::sleep(PACE).await,
                _ => return Ok(reply),
            }
        }
    })?;
    match ask.output {
        Format::Json => output::json(&reply)?,
        Format::Table => output::print(&harmless(&render(ask, &reply)))?,
    }
    if ask.wait.is_some() && !is_settled(ask, &reply) {
        return Err(Failure::runtime("not all of it is in force"));
    }
    Ok(())
}

async fn fetch(ask: &AskServer) -> Result<StatusReply, Failure> {
    let request = StatusRequest { endpoints: ask.endpoints.iter().map(IpAddr::to_string).collect() };
    call(&ask.at.server, &ask.at.files, async |mut client| client.status(request).await).await
}

/// Asks a policy server for something.
pub(super) async fn call<T>(
    url: &str,
    files: &Files,
    request: impl AsyncFnOnce(StatusClient) -> Result<Response<T>, Status>,
) -> Result<T, Failure> {
    let Files { ca, cert, key } = files.clone();
    let server = PolicyServer { url: url.to_owned(), ca, cert, key, cache: PathBuf::new() };
    let failed = |reason: String| Failure::runtime(format_args!("{}: {reason}", server.url));
    let (channel, breakage) = connect_watched(&server).await.map_err(failed)?;
    let client = PolicyStatusClient::new(channel).max_decoding_message_size(LONGEST);
    match timeout(PATIENCE, request(client)).await {
        Err(_) => Err(failed(format!("no answer within {} s", PATIENCE.as_secs()))),
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) if status.code() == Code::Unimplemented => {
            Err(failed("no policy server of this version answers there".to_owned()))
        }
        Ok(Err(status)) if status.code() == Code::FailedPrecondition => Err(failed(status.message().to_owned())),
        Ok(Err(status)) => Err(failed(breakage.explain(explain(&status)))),
    }
}

/// Whether everything that is shown is in force where it should be.
fn is_settled(ask: &AskServer, reply: &StatusReply) -> bool {
    let endpoint = |it: &EndpointState| {
        let at = |names: &[String]| names.contains(&it.gateway);
        !it.policy.is_empty()
            && !it.vips.is_empty()
            && if it.gateway.is_empty() { it.pending.is_empty() && !it.in_force.is_empty() } else { at(&it.in_force) }
    };
    if ask.endpoints.is_empty() {
        let policy = |it: &PolicyState| it.accepted && it.pending.is_empty() && !it.in_force.is_empty();
        return !reply.version.is_empty() && reply.policies.iter().all(policy);
    }
    reply.endpoints.iter().all(endpoint)
}

fn render(ask: &AskServer, reply: &StatusReply) -> String {
    let mut out = String::new();
    if !ask.endpoints.is_empty() {
        return endpoints(reply);
    }
    let source = reply.source.clone().unwrap_or_default();
    let state = if source.connected { String::new() } else { format!(", CAN'T BE ASKED: {}", source.error) };
    // Writing to a String can't fail.
    let _ = writeln!(out, "server    vipgate {}", reply.program);
    let _ = writeln!(out, "source    {}{state}", source.source);
    if !source.healthy {
        let state = if source.waiting { "WAITING" } else { "UNHEALTHY" };
        let age = span(source.since_seconds * 1000);
        let instead = if source.waiting { "nothing is published" } else { "the last good state stays in force" };
        let _ = writeln!(out, "          {state} for {age}, {instead}:");
        for reason in &source.reasons {
            let _ = writeln!(out, "          {reason}");
        }
    }
    let version = if reply.version.is_empty() { "none yet" } else { &reply.version };
    let StatusReply { vips, covered_endpoints, services, .. } = reply;
    let _ = writeln!(out, "policy    {version}, {vips} VIPs, {covered_endpoints} endpoints, {services} Services\n");
    let mut table = Table::new([
        word("policy"),
        word("state"),
        number("endpoints"),
        word("vips"),
        word("in force"),
        word("pending"),
    ]);
    for policy in &reply.policies {
        let state = match (policy.accepted, policy.last_good) {
            (true, _) => "accepted",
            (false, true) => "LAST GOOD",
            (false, false) => "REFUSED",
        };
        table.row([
            policy.name.clone(),
            state.to_owned(),
            policy.endpoints.to_string(),
            policy.vips.join(" "),
            policy.in_force.join(" "),
            policy.pending.join(" "),
        ]);
    }
    out += &table.take();
    for policy in reply.policies.iter().filter(|policy| !policy.reasons.is_empty()) {
        let _ = writeln!(out, "\n{}:", policy.name);
        for reason in &policy.reasons {
            let _ = writeln!(out, "  {reason}");
        }
    }
    out.push('\n');
    let mut table = Table::new([word("gateway"), word("state"), word("address"), word("for"), word("remark")]);
    for gateway in &reply.gateways {
        let state = match (gateway.connected, gateway.in_step) {
            (true, true) => "in step",
            (true, false) => "BEHIND",
            (false, _) => "NOT CONNECTED",
        };
        let mut remarks = Vec::new();
        if !gateway.known {
            remarks.push("has no Gateway manifest: it holds nothing".to_owned());
        }
        if !gateway.error.is_empty() {
            remarks.push(format!("refused: {}", gateway.error));
        }
        let age = if gateway.address.is_empty() { String::new() } else { span(gateway.since_seconds * 1000) };
        table.row([gateway.name.clone(), state.to_owned(), gateway.address.clone(), age, remarks.join("; ")]);
    }
    out += &table.take();
    if !reply.members.is_empty() {
        out.push('\n');
        out += &members(reply);
    }
    if !reply.complaints.is_empty() {
        out.push('\n');
    }
    for it in &reply.complaints {
        let line = if it.line > 0 { format!(":{}", it.line) } else { String::new() };
        let field = if it.field.is_empty() { String::new() } else { format!("{}: ", it.field) };
        let warning = if it.severity == "warning" { "warning: " } else { "" };
        let _ = writeln!(out, "{}{line}: {field}{warning}{}", it.file, it.reason);
    }
    out
}

/// Who serves, by the word of the authority over leases.
fn members(reply: &StatusReply) -> String {
    let mut table = Table::new([word("member"), word("serving"), number("epoch"), word("wish"), number("view")]);
    for it in &reply.members {
        let view = if it.view == reply.view { it.view.to_string() } else { format!("{} of {}", it.view, reply.view) };
        let wish = if it.wish.is_empty() { "not heard" } else { &it.wish };
        let serving = if it.serving { "yes" } else { "NO" };
        table.row([it.name.clone(), serving.to_owned(), it.epoch.to_string(), wish.to_owned(), view]);
    }
    table.take()
}

fn endpoints(reply: &StatusReply) -> String {
    let mut table = Table::new([
        word("endpoint"),
        word("policy"),
        word("vips"),
        word("gateway"),
        word("in force"),
        word("pending"),
    ]);
    for it in &reply.endpoints {
        let policy = if it.policy.is_empty() { "none covers it".to_owned() } else { it.policy.clone() };
        let gateway = if it.gateway.is_empty() { "any".to_owned() } else { it.gateway.clone() };
        table.row([
            it.address.clone(),
            policy,
            it.vips.join(" "),
            gateway,
            it.in_force.join(" "),
            it.pending.join(" "),
        ]);
    }
    table.take()
}
