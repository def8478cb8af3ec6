//! `vipgate policy status`: state of each policy, gateway and member at a policy server.

use std::fmt::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::Format;
use super::show::block_on;
use super::status::SLICES_UNVERIFIED;
use super::table::{Table, number, word};
use crate::command_error::CommandError;
use crate::config::PolicyServer;
use crate::output;
use crate::output::{format_duration, sanitize};
use crate::xds::client::{Target, describe_status, open_channel};
use crate::xds::proto::policy_status_client::PolicyStatusClient;
use crate::xds::proto::{EndpointState, NodesState, PolicyState, StatusReply, StatusRequest};

/// Timeout of a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of a reply in bytes.
const MAX_REPLY_BYTES: usize = 256 << 20;
/// Poll interval while waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Client of a policy server's status service.
pub(super) type StatusClient = PolicyStatusClient<Channel>;

/// Server arguments.
#[derive(Clone, Debug, Args)]
pub(super) struct Server {
    /// URL of the policy server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:18000")]
    pub(super) server: String,
    #[command(flatten)]
    pub(super) files: TlsArgs,
}

/// TLS files of the connection.
#[derive(Clone, Debug, Args)]
pub(super) struct TlsArgs {
    /// CA certificates for the server's certificate (PEM); default: the system's
    #[arg(long, value_name = "FILE")]
    pub(super) ca: Option<PathBuf>,
    /// Client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "key")]
    pub(super) cert: Option<PathBuf>,
    /// Private key of the client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub(super) key: Option<PathBuf>,
}

/// Arguments of `vipgate policy status`.
#[derive(Clone, Debug, Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    server: Server,
    /// Show this endpoint: its policy, and the gateways on which it is in force; can be repeated
    #[arg(long = "endpoint", value_name = "ADDR")]
    endpoints: Vec<IpAddr>,
    /// Timeout in seconds: fail unless everything shown is in force on every connected gateway it is for by then
    #[arg(long, value_name = "SECONDS")]
    wait: Option<u64>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub(super) fn status(args: &StatusArgs) -> Result<(), CommandError> {
    let reply = block_on(async {
        let deadline = args.wait.map(|seconds| Instant::now() + Duration::from_secs(seconds));
        loop {
            let reply = fetch(args).await?;
            match deadline {
                Some(deadline) if !is_in_force(args, &reply) && Instant::now() < deadline => {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                _ => return Ok(reply),
            }
        }
    })?;
    match args.output {
        Format::Json => output::json(&reply)?,
        Format::Table => output::print(&sanitize(&render(args, &reply)))?,
    }
    if args.wait.is_some() && !is_in_force(args, &reply) {
        return Err(CommandError::runtime("not all of it is in force"));
    }
    Ok(())
}

async fn fetch(args: &StatusArgs) -> Result<StatusReply, CommandError> {
    let request = StatusRequest { endpoints: args.endpoints.iter().map(IpAddr::to_string).collect() };
    call(&args.server.server, &args.server.files, async |mut client| client.status(request).await).await
}

/// Sends one request to a policy server.
pub(super) async fn call<T>(
    url: &str,
    files: &TlsArgs,
    request: impl AsyncFnOnce(StatusClient) -> Result<Response<T>, Status>,
) -> Result<T, CommandError> {
    let TlsArgs { ca, cert, key } = files.clone();
    let (url, cache) = (url.to_owned(), PathBuf::new());
    let server = PolicyServer { url, other_urls: Vec::new(), ca, cert, key, token: None, cache };
    let failed = |reason: String| CommandError::runtime(reason).context(&server.url);
    let connected = open_channel(&server, &Target::first(&server)).await;
    let (channel, breakage) = connected.map_err(|error| CommandError::runtime(error).context(&server.url))?;
    let client = PolicyStatusClient::new(channel).max_decoding_message_size(MAX_REPLY_BYTES);
    match timeout(REPLY_TIMEOUT, request(client)).await {
        Err(_) => Err(failed(format!("no reply within {} s", REPLY_TIMEOUT.as_secs()))),
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) if status.code() == Code::Unimplemented => {
            Err(failed("the listener is not a policy server of this version".to_owned()))
        }
        Ok(Err(status)) if status.code() == Code::FailedPrecondition => Err(failed(status.message().to_owned())),
        Ok(Err(status)) => Err(failed(breakage.explain(describe_status(&status)))),
    }
}

/// Whether everything shown is in force on its gateways.
fn is_in_force(args: &StatusArgs, reply: &StatusReply) -> bool {
    let endpoint = |it: &EndpointState| {
        let includes_gateway = |names: &[String]| names.contains(&it.gateway);
        !it.policy.is_empty()
            && !it.vips.is_empty()
            && if it.gateway.is_empty() {
                it.pending.is_empty() && !it.in_force.is_empty()
            } else {
                includes_gateway(&it.in_force)
            }
    };
    if args.endpoints.is_empty() {
        let policy = |it: &PolicyState| {
            it.accepted && it.pending.is_empty() && !it.in_force.is_empty() && it.set_aside.is_empty()
        };
        return !reply.version.is_empty() && reply.policies.iter().all(policy);
    }
    reply.endpoints.iter().all(endpoint)
}

fn render(args: &StatusArgs, reply: &StatusReply) -> String {
    let mut out = String::new();
    if !args.endpoints.is_empty() {
        return endpoints(reply);
    }
    render_source(&mut out, reply);
    render_policies(&mut out, reply);
    out.push('\n');
    out += &gateways(reply);
    if !reply.members.is_empty() {
        out.push('\n');
        out += &members(reply);
    }
    if !reply.diagnostics.is_empty() {
        out.push('\n');
    }
    for it in &reply.diagnostics {
        let line = if it.line > 0 { format!(":{}", it.line) } else { String::new() };
        let field = if it.field.is_empty() { String::new() } else { format!("{}: ", it.field) };
        let warning = if it.severity == "warning" { "warning: " } else { "" };
        // Writing to a String can't fail.
        let _ = writeln!(out, "{}{line}: {field}{warning}{}", it.file, it.reason);
    }
    out
}

/// The server, its policy source and the published policy.
fn render_source(out: &mut String, reply: &StatusReply) {
    let source = reply.source.clone().unwrap_or_default();
    let state = if source.connected { String::new() } else { format!(", UNREACHABLE: {}", source.error) };
    // Writing to a String can't fail.
    let _ = writeln!(out, "server    vipgate {}", reply.program);
    let _ = writeln!(out, "source    {}{state}", source.source);
    if !source.healthy {
        let state = if source.waiting { "WAITING" } else { "UNHEALTHY" };
        let age = format_duration(source.since_seconds * 1000);
        let effect = if source.waiting { "nothing is published" } else { "the last good state stays in force" };
        let _ = writeln!(out, "          {state} for {age}, {effect}:");
        for reason in &source.reasons {
            let _ = writeln!(out, "          {reason}");
        }
    }
    if source.slices_unverified {
        let _ = writeln!(out, "slices    {SLICES_UNVERIFIED}");
    }
    let version = if reply.version.is_empty() { "none yet" } else { &reply.version };
    let StatusReply { vips, covered_endpoints, services, .. } = reply;
    let _ = writeln!(out, "policy    {version}, {vips} VIPs, {covered_endpoints} endpoints, {services} Services");
    if let Some(NodesState { nodes, connected, rejected }) = &reply.nodes {
        let rejected =
            if rejected.is_empty() { String::new() } else { format!(", REJECTED by {}", rejected.join(" ")) };
        let _ = writeln!(out, "nodes     agents of {connected} connected, {nodes} in the policy{rejected}");
    }
    out.push('\n');
}

/// Policies with their state and VIPs, then why some aren't in force as written.
fn render_policies(out: &mut String, reply: &StatusReply) {
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
            (false, false) => "REJECTED",
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
    *out += &table.take();
    for policy in reply.policies.iter().filter(|policy| !policy.reasons.is_empty() || !policy.set_aside.is_empty()) {
        let _ = writeln!(out, "\n{}:", policy.name);
        for reason in &policy.reasons {
            let _ = writeln!(out, "  {reason}");
        }
        for it in &policy.set_aside {
            let _ = writeln!(out, "  set aside at {}: {}: {}", it.gateway, it.resource, it.reason);
        }
    }
    for it in reply.set_aside.iter().filter(|it| it.gateway.is_empty()) {
        let _ = writeln!(out, "\nleft out for all gateways, please report it: {}: {}", it.resource, it.reason);
    }
}

/// Gateways and whether they have the published policy in force.
fn gateways(reply: &StatusReply) -> String {
    let mut table = Table::new([word("gateway"), word("state"), word("address"), word("connected"), word("notes")]);
    for gateway in &reply.gateways {
        let state = match (gateway.connected, gateway.in_step) {
            (true, true) => "in sync",
            (true, false) => "BEHIND",
            (false, _) => "NOT CONNECTED",
        };
        let mut notes = Vec::new();
        if !gateway.known {
            notes.push("no VipGateway manifest: it owns no VIPs".to_owned());
        }
        if !gateway.error.is_empty() {
            notes.push(format!("rejected: {}", gateway.error));
        }
        let aside = reply.set_aside.iter().filter(|it| it.gateway == gateway.name);
        let aside: Vec<&str> = aside.map(|it| &*it.resource).collect();
        if !aside.is_empty() {
            notes.push(format!("set aside: {}", aside.join(", ")));
        }
        let age =
            if gateway.address.is_empty() { String::new() } else { format_duration(gateway.since_seconds * 1000) };
        table.row([gateway.name.clone(), state.to_owned(), gateway.address.clone(), age, notes.join("; ")]);
    }
    table.take()
}

/// Membership, as the policy server manages it.
fn members(reply: &StatusReply) -> String {
    let mut table =
        Table::new([word("member"), word("active"), number("epoch"), word("desired"), number("view"), word("notes")]);
    for it in &reply.members {
        let view = if it.view == reply.view { it.view.to_string() } else { format!("{} of {}", it.view, reply.view) };
        let desired = if it.desired_state.is_empty() { "unknown" } else { &it.desired_state };
        let active = if it.serving { "yes" } else { "NO" };
        table.row([
            it.name.clone(),
            active.to_owned(),
            it.epoch.to_string(),
            desired.to_owned(),
            view,
            it.drain_blocked.clone(),
        ]);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::proto::SourceStatus;

    fn shown(source: SourceStatus) -> String {
        let mut out = String::new();
        render_source(&mut out, &StatusReply { source: Some(source), ..StatusReply::default() });
        out
    }

    #[test]
    fn slices_that_are_not_verified_are_one_line_after_the_source() {
        let source = SourceStatus { source: "etcd".to_owned(), connected: true, healthy: true, ..Default::default() };
        let verified = shown(source.clone());
        let line = "slices    addresses NOT VERIFIED: tenancy is strict, but the source has no Pod\n";
        let expected = verified.replace("source    etcd\n", &format!("source    etcd\n{line}"));
        assert!(verified.contains("source    etcd\npolicy    none yet"), "{verified}");
        assert_eq!(shown(SourceStatus { slices_unverified: true, ..source }), expected);
    }
}
