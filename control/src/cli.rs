//! The command line.

mod accept_empty;
mod capture;
mod certificates;
mod cloud;
mod drain;
mod drops;
mod explain;
mod generate;
mod node;
mod peers;
mod placement;
mod policy;
mod ports;
mod services;
mod sessions;
mod show;
mod status;
mod table;
mod trace;

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use vipgate_dataplane::session::query::{SessionFilter, SessionState};
use vipgate_policy::compiler::Tenancy;
use vipgate_policy::manifest::crd;

use crate::admin::filter::{protocol, session_state};
use crate::command_error::CommandError;
use crate::schema::{self, Published};
use crate::{check, demo, gateway, kernel, logging, output, policyd};

/// NAT and load-balancing gateway for Kubernetes on AF_XDP: pods' egress traffic has their Service's VIP as its source.
#[derive(Debug, Parser)]
#[command(name = "vipgate", version, max_term_width = 100)]
#[command(after_help = "Example:\n  vipgate gateway --config gateway.yaml")]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What tenants may use, as an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TenancyArg {
    /// Policies of a namespace use its own pods and Services, and AddressPools for it
    Strict,
    /// Policies may use pods and addresses of all
    Open,
}

impl From<TenancyArg> for Tenancy {
    fn from(argument: TenancyArg) -> Self {
        match argument {
            TenancyArg::Strict => Self::Strict,
            TenancyArg::Open => Self::Open,
        }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a gateway in the foreground; SIGTERM stops it, SIGHUP reloads the policy
    #[command(after_help = "Example:\n  vipgate gateway --config gateway.yaml")]
    Gateway {
        /// Configuration of the gateway
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Run a node agent in the foreground, which takes pods' packets to their gateways; or ask a running one
    #[command(after_help = "Example:\n  vipgate node --config node.yaml")]
    Node(node::Node),
    /// Run a policy server in the foreground: compiles manifests, distributes policy to gateways over gRPC (delta xDS)
    #[command(after_help = "Example:\n  vipgate policyd --config policyd.yaml")]
    Policyd {
        /// Configuration of the policy server
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Show the state of each policy, or accept an empty policy source
    #[command(after_help = "Example:\n  vipgate policy status --server http://127.0.0.1:18000")]
    Policy {
        #[command(subcommand)]
        action: PolicyAction,
    },
    /// Show public addresses of cloud providers: observed, desired, what would be done
    #[command(after_help = "Example:\n  vipgate cloud status --server http://127.0.0.1:18000")]
    Cloud {
        #[command(subcommand)]
        action: cloud::CloudAction,
    },
    /// Remove what a stopped gateway leaves in place (`on_exit: drop`): XDP programs, routes, stored sessions
    #[command(after_help = "Example:\n  vipgate detach --config gateway.yaml")]
    Detach {
        /// Configuration of the gateway
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Wait for end of file on standard input, then remove the routes that a gateway here has advertised
    #[command(name = kernel::WITHDRAW, hide = true)]
    Withdraw,
    /// Make and renew the certificate of a policy server, as Secrets in the Kubernetes API, and end
    ///
    /// It signs itself. It is made anew, with the same key, when it is missing, can't be used, has other names or ends
    /// soon; otherwise it is kept. The Helm chart's Job and CronJob run it.
    #[command(after_help = certificates::EXAMPLE)]
    Certificates(certificates::Certificates),
    /// Validate configuration and manifests: file, line, field, reason
    #[command(after_help = "Example:\n  vipgate check gateway.yaml policy/")]
    Check {
        /// Files and directories
        #[arg(required_unless_present_any = ["print_schema", "print_crds", "explain"], value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Print JSON schemas instead: of one kind or configuration file, or of all in one object
        #[arg(long, value_name = "KIND", ignore_case = true, conflicts_with = "paths")]
        #[expect(clippy::option_option, reason = "clap's form of a flag whose value may be left out")]
        print_schema: Option<Option<Published>>,
        /// Print the CustomResourceDefinitions of vipgate's kinds instead, as YAML
        #[arg(long, conflicts_with_all = ["paths", "print_schema"])]
        print_crds: bool,
        /// Tenancy to compile manifests for; default: that of the configuration files at the paths, else strict
        #[arg(long, value_enum)]
        tenancy: Option<TenancyArg>,
        /// Explain a code such as VG0301 instead; without a code, or with `list`: list all codes
        #[arg(long, value_name = "CODE", conflicts_with_all = ["paths", "print_schema", "print_crds", "output"])]
        #[expect(clippy::option_option, reason = "clap's form of a flag whose value may be left out")]
        explain: Option<Option<String>>,
        /// Output format
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Build demo topologies in network namespaces, run them, report, clean up
    ///
    /// First with one gateway, then with two, of which one is killed during a download, then with a node whose agent steers
    /// its pods to two gateways.
    #[command(after_help = "Example:\n  vipgate demo --keep")]
    Demo {
        /// Keep the topologies after the report, for inspection
        #[arg(long)]
        keep: bool,
        /// One gateway, with the policy of a Kubernetes API server: needs kube-apiserver, etcd and kubectl
        #[arg(long)]
        kubernetes: bool,
    },
    /// Show the gateway: policy, workers, interfaces, sockets
    #[command(after_help = "Example:\n  vipgate status -o json")]
    Status(QueryArgs),
    /// Show sessions, or end some
    #[command(args_conflicts_with_subcommands = true)]
    #[command(after_help = "Example:\n  vipgate sessions --endpoint 10.1.0.11 --state established")]
    Sessions {
        #[command(subcommand)]
        action: Option<SessionsAction>,
        #[command(flatten)]
        gateway: QueryArgs,
        #[command(flatten)]
        filter: Filter,
        /// Limit of shown sessions; 0: all; default: 100 in a table, all in JSON
        #[arg(long, value_name = "N")]
        limit: Option<u64>,
    },
    /// Show VIPs: announcement, owner, endpoints, sessions
    #[command(after_help = "Example:\n  vipgate vips")]
    Vips(QueryArgs),
    /// Show endpoints: pods that an egress policy covers
    #[command(after_help = "Example:\n  vipgate endpoints")]
    Endpoints(QueryArgs),
    /// Show Services with their backends
    #[command(after_help = "Example:\n  vipgate services")]
    Services(QueryArgs),
    /// Show gateways: membership, lease, links, session replication
    #[command(after_help = "Example:\n  vipgate peers")]
    Peers(QueryArgs),
    /// Drain the gateway: other gateways take over its shards once its sessions are replicated
    ///
    /// Sessions continue on the other gateways. The state is lost on a restart: a restarted gateway is active again.
    #[command(after_help = "Example:\n  vipgate drain --dry-run")]
    Drain(drain::Drain),
    /// Make a drained gateway active again
    #[command(after_help = "Example:\n  vipgate undrain --wait 60")]
    Undrain(drain::Undrain),
    /// Show what a change of manifests would move between gateways; changes nothing
    ///
    /// Compiles the manifests and compares the result with the placement in force at a running gateway, whichever
    /// gateways are active.
    #[command(after_help = "Example:\n  vipgate placement --dry-run /etc/vipgate/policy")]
    Placement(placement::Placement),
    /// Show port usage of each VIP
    #[command(after_help = "Example:\n  vipgate ports")]
    Ports(QueryArgs),
    /// Show dropped packets by reason and by address, with the last packet of each
    #[command(after_help = "Example:\n  vipgate drops --reason no_service")]
    Drops(drops::Drops),
    /// Trace a synthetic packet through the live tables, step by step; changes nothing
    #[command(after_help = "Example:\n  vipgate trace --from 10.1.0.11 --to 198.51.100.10:443")]
    Trace(trace::Trace),
    /// Explain how policy handles an address: the policy that applies and why, VIPs, limits
    #[command(after_help = "Example:\n  vipgate explain 10.1.0.11")]
    Explain(explain::Explain),
    /// Capture packets before and after translation, each with its verdict
    Capture(capture::Capture),
    /// Print completions for a shell
    #[command(after_help = "Example:\n  vipgate completions bash > /etc/bash_completion.d/vipgate")]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Rewrite the generated sections of Markdown files
    #[command(hide = true)]
    Generate {
        /// Their directory
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Write manual pages
    #[command(after_help = "Example:\n  vipgate man /usr/local/share/man/man1")]
    Man {
        /// Output directory
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum PolicyAction {
    /// Show each policy: accepted or rejected, and the gateways on which it is in force
    #[command(after_help = "Example:\n  vipgate policy status --server http://127.0.0.1:18000 --wait 30")]
    Status(policy::StatusArgs),
    /// Accept an empty policy source, once: removes the objects that stay in force only because their source is empty
    ///
    /// Sent to the gateway at --socket, if its policy is in files, or to the policy server at --server. Fails if no
    /// source has become empty.
    #[command(after_help = "Example:\n  vipgate policy accept-empty --server http://127.0.0.1:18000")]
    AcceptEmpty(accept_empty::AcceptEmpty),
}

#[derive(Debug, Subcommand)]
enum SessionsAction {
    /// End matching sessions
    #[command(after_help = "Example:\n  vipgate sessions flush --endpoint 10.1.0.11 --proto tcp")]
    Flush {
        /// End all sessions: required without a filter
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        gateway: QueryArgs,
        #[command(flatten)]
        filter: Filter,
    },
}

/// Arguments of the commands that query a gateway.
#[derive(Clone, Debug, Args)]
pub struct QueryArgs {
    /// Admin socket of the gateway
    #[arg(long, value_name = "PATH", default_value = "/run/vipgate/gateway.sock")]
    socket: PathBuf,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Aligned text
    Table,
    /// One JSON document
    Json,
}

/// Session filter: every given option must match.
#[derive(Clone, Debug, Default, Args, PartialEq, Eq)]
pub struct Filter {
    /// Address of the pod
    #[arg(long, value_name = "ADDR")]
    endpoint: Option<IpAddr>,
    /// Address of the VIP
    #[arg(long, value_name = "ADDR")]
    vip: Option<IpAddr>,
    /// Remote address
    #[arg(long, value_name = "ADDR")]
    remote: Option<IpAddr>,
    /// tcp, udp, sctp, icmp, icmpv6 or a number
    #[arg(long, value_parser = protocol)]
    proto: Option<u8>,
    /// opening, established, half_closed, closing or quarantined
    #[arg(long, value_parser = session_state)]
    state: Option<SessionState>,
}

impl From<&Filter> for SessionFilter {
    fn from(filter: &Filter) -> Self {
        let Filter { endpoint, vip, remote, proto: protocol, state } = *filter;
        Self { endpoint, vip, remote, protocol, state }
    }
}

/// Runs the command. Exit codes: 0 done, 1 failed, 2 wrong usage, configuration or manifest.
pub fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = format!("vipgate: {error}");
            if !logging::print_last(&text) {
                output::print_error(text);
            }
            error.exit_code()
        }
    }
}

fn run(cli: Cli) -> Result<(), CommandError> {
    match cli.command {
        Command::Gateway { config } => gateway::run(&config),
        Command::Policyd { config } => policyd::run(&config),
        Command::Node(args) => node::run(&args),
        Command::Policy { action: PolicyAction::Status(args) } => policy::status(&args),
        Command::Policy { action: PolicyAction::AcceptEmpty(args) } => accept_empty::run(&args),
        Command::Cloud { action } => cloud::run(&action),
        Command::Detach { config } => gateway::detach(&config),
        Command::Withdraw => gateway::withdraw(),
        Command::Certificates(args) => certificates::run(&args),
        Command::Check { print_schema: Some(Some(of)), .. } => output::json(&schema::document(of)),
        Command::Check { print_schema: Some(None), .. } => output::json(&schema::all()),
        Command::Check { print_crds: true, .. } => output::print(&crd::yaml().map_err(CommandError::runtime)?),
        Command::Check { explain: Some(code), .. } => explain_code(code.as_deref()),
        Command::Check { paths, output, tenancy, .. } => run_check(&paths, tenancy.map(Tenancy::from), output),
        Command::Demo { keep, kubernetes: false } => demo::run(keep),
        Command::Demo { keep, kubernetes: true } => demo::run_kubernetes(keep),
        Command::Status(args) => status::run(&args),
        Command::Sessions { action: Some(SessionsAction::Flush { gateway, filter, all }), .. } => {
            sessions::flush(&gateway, &filter, all)
        }
        Command::Sessions { action: None, gateway, filter, limit } => sessions::list(&gateway, &filter, limit),
        Command::Vips(args) => show::vips(&args),
        Command::Endpoints(args) => show::endpoints(&args),
        Command::Services(args) => services::run(&args),
        Command::Peers(args) => peers::run(&args),
        Command::Drain(args) => drain::drain(&args),
        Command::Undrain(args) => drain::undrain(&args),
        Command::Placement(args) => placement::run(&args),
        Command::Ports(args) => ports::run(&args),
        Command::Drops(args) => drops::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Completions { shell } => generate::completions(shell),
        Command::Generate { directory } => generate::generate(&directory),
        Command::Man { directory } => generate::man(&directory),
    }
}

fn explain_code(code: Option<&str>) -> Result<(), CommandError> {
    let text = code.map_or_else(|| Ok(check::explain::list()), check::explain::explain);
    output::print(&text.map_err(CommandError::usage)?)
}

fn run_check(paths: &[PathBuf], tenancy: Option<Tenancy>, format: Format) -> Result<(), CommandError> {
    let report = check::run(paths, tenancy);
    for diagnostic in &report.diagnostics {
        output::print_error(diagnostic);
    }
    match format {
        Format::Table => output::print(&report.to_string())?,
        Format::Json => output::json(&report)?,
    }
    check_errors(&report)
}

/// Fails if there are errors among the diagnostics.
fn check_errors(report: &check::Report) -> Result<(), CommandError> {
    match report.errors() {
        0 => Ok(()),
        1 => Err(CommandError::usage("1 error")),
        errors => Err(CommandError::usage(format!("{errors} errors"))),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_visible_command_has_an_example_in_its_help() {
        fn check(command: &clap::Command) {
            for it in command.get_subcommands().filter(|it| !it.is_hide_set()) {
                let help = it.get_after_help().map(ToString::to_string).unwrap_or_default();
                let (_, example) =
                    help.split_once("Example:\n  ").unwrap_or_else(|| panic!("{}: {help}", it.get_name()));
                // Quotes and redirections are the shell's.
                if !example.contains(['\'', '>']) {
                    assert!(Cli::try_parse_from(example.split(' ')).is_ok(), "{example}");
                }
                check(it);
            }
        }
        check(&Cli::command());
    }

    #[test]
    fn check_takes_paths_or_print_options() {
        let parsed = |line: &str| Cli::try_parse_from(line.split(' ')).map(|cli| cli.command);
        for (line, schema) in [
            ("vipgate check --print-schema", None),
            ("vipgate check --print-schema EgressPolicy", Some(Published::EgressPolicy)),
            ("vipgate check --print-schema GATEWAY.yaml", Some(Published::GatewayYaml)),
            ("vipgate check --print-schema vipgateway", Some(Published::Gateway)),
            ("vipgate check --print-schema Gateway", Some(Published::Gateway)),
        ] {
            let Ok(Command::Check { print_schema, .. }) = parsed(line) else { panic!("{line}") };
            assert_eq!(print_schema, Some(schema), "{line}");
        }
        assert!(matches!(parsed("vipgate check --print-crds"), Ok(Command::Check { print_crds: true, .. })));
        assert!(matches!(
            parsed("vipgate check a b"),
            Ok(Command::Check { print_schema: None, print_crds: false, explain: None, .. })
        ));
        for (line, code) in
            [("--explain", None), ("--explain list", Some("list")), ("--explain vg0301", Some("vg0301"))]
        {
            let Ok(Command::Check { explain, .. }) = parsed(&format!("vipgate check {line}")) else { panic!("{line}") };
            assert_eq!(explain, Some(code.map(str::to_owned)), "{line}");
        }
        for (line, expected) in [("", None), (" --tenancy open", Some(Tenancy::Open))] {
            let Ok(Command::Check { tenancy, .. }) = parsed(&format!("vipgate check a{line}")) else {
                panic!("{line}")
            };
            assert_eq!(tenancy.map(Tenancy::from), expected, "{line}");
        }
        for line in [
            "vipgate check",
            "vipgate check a --tenancy closed",
            "vipgate check a --print-schema",
            "vipgate check a --print-crds",
            "vipgate check --print-schema --print-crds",
            "vipgate check a --explain VG0301",
            "vipgate check --explain VG0301 --print-crds",
            "vipgate check --print-schema Service",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
