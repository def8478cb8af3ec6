//! The command line.

mod accept_empty;
mod capture;
mod drain;
mod drops;
mod explain;
mod generate;
pub(crate) mod output;
mod peers;
mod policy;
mod ports;
mod services;
mod sessions;
mod show;
mod status;
mod table;
mod top;
mod trace;

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use vipgate_dataplane::command::SessionState;

use crate::admin::filter::{protocol, protocol_name, state};
use crate::admin::proto;
use crate::failure::Failure;
use crate::manifest::crd;
use crate::manifest::schema::{self, Published};
use crate::{check, demo, gateway, kernel, policyd};

/// Pods leave as their Service's VIP: a gateway on AF_XDP.
#[derive(Debug, Parser)]
#[command(name = "vipgate", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a gateway in the foreground; SIGTERM stops it, SIGHUP reads the policy again
    Gateway {
        /// Configuration of the gateway
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Run a policy server in the foreground: compiles manifests, and serves gateways over gRPC
    Policyd {
        /// Configuration of the policy server
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Ask a policy server, or say that its source is empty on purpose
    Policy {
        #[command(subcommand)]
        action: PolicyAction,
    },
    /// Remove what a stopped gateway left in place on purpose (`on_exit: drop`)
    Detach {
        /// Configuration of the gateway
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Wait for the end of standard input, then remove the routes that a gateway here has advertised
    #[command(name = kernel::WITHDRAW, hide = true)]
    Withdraw,
    /// Validate configuration and manifests: file, line, field, reason
    Check {
        /// Files and directories
        #[arg(required_unless_present_any = ["print_schema", "print_crds"], value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Print JSON schemas instead: of one kind or configuration file, or of all in one object
        #[arg(long, value_name = "KIND", ignore_case = true, conflicts_with = "paths")]
        #[expect(clippy::option_option, reason = "clap's form of a flag whose value may be left out")]
        print_schema: Option<Option<Published>>,
        /// Print the CustomResourceDefinitions of vipgate's kinds instead, as YAML
        #[arg(long, conflicts_with_all = ["paths", "print_schema"])]
        print_crds: bool,
        /// How to show what was found
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Build clusters and a piece of the world in network namespaces, run them, report, clean up
    ///
    /// First with one gateway, then with two, of which one is killed during a download.
    Demo {
        /// Leave both networks up after the report, to look around
        #[arg(long)]
        keep: bool,
    },
    /// Show the gateway: policy, workers, interfaces, sockets
    Status(Ask),
    /// Show its sessions, or end some
    #[command(args_conflicts_with_subcommands = true)]
    Sessions {
        #[command(subcommand)]
        action: Option<SessionsAction>,
        #[command(flatten)]
        ask: Ask,
        #[command(flatten)]
        filter: Filter,
        /// Show at most this many; 0 shows all; default: 100 in a table, all in JSON
        #[arg(long, value_name = "N")]
        limit: Option<u64>,
    },
    /// Show its VIPs
    Vips(Ask),
    /// Show the endpoints that its policy covers
    Endpoints(Ask),
    /// Show its Services, with their backends
    Services(Ask),
    /// Show all gateways: who serves, how links and copies of sessions stand, and who decides
    Peers(Ask),
    /// Let other gateways serve in this one's place: it stops when they have copies of its sessions
    ///
    /// Sessions go on at the others. The gateway remembers it only while its process lives: once restarted, it serves again.
    Drain(drain::Drain),
    /// Let a drained gateway serve again
    Undrain(drain::Undrain),
    /// Show what of each VIP's ports is in use
    Ports(Ask),
    /// Show dropped packets by reason, and by whom, with the last of each
    Drops(drops::Drops),
    /// Say what the live tables would do with a packet, step by step, and why it would be dropped
    Trace(trace::Trace),
    /// Say what policy makes of an address: which policy wins and why, and what it leaves as
    Explain(explain::Explain),
    /// Capture packets as they come and go, each with its verdict
    Capture(capture::Capture),
    /// Watch the gateway: rates, sessions, drops, VIPs, workers
    Top(top::Top),
    /// Print completions for a shell
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Write manual pages
    Man {
        /// The folder for them
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum PolicyAction {
    /// Show each policy: accepted, in force on which gateways, or the reason why not
    Status(policy::AskServer),
    /// Take an empty source of manifests at its word, once: what stays in force only since that isn't believed, goes
    ///
    /// Asks the gateway at --socket, whose policy is in files, or the policy server at --server. Fails when nothing is empty that had
    /// manifests.
    AcceptEmpty(accept_empty::AcceptEmpty),
}

#[derive(Debug, Subcommand)]
enum SessionsAction {
    /// End sessions that match
    Flush {
        /// End all sessions: needed without a filter
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        ask: Ask,
        #[command(flatten)]
        filter: Filter,
    },
}

/// Whom to ask, and how to show the answer.
#[derive(Clone, Debug, Args)]
pub struct Ask {
    /// Admin socket of the gateway
    #[arg(long, value_name = "PATH", default_value = "/run/vipgate/gateway.sock")]
    socket: PathBuf,
    /// How to show the answer
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// How to show an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    Table,
    /// For programs: one document
    Json,
}

/// Which sessions; everything that is given must match.
#[derive(Clone, Debug, Default, Args, PartialEq, Eq)]
pub struct Filter {
    /// Address of the pod
    #[arg(long, value_name = "ADDR")]
    endpoint: Option<IpAddr>,
    /// Address of the VIP
    #[arg(long, value_name = "ADDR")]
    vip: Option<IpAddr>,
    /// Address of the far side
    #[arg(long, value_name = "ADDR")]
    remote: Option<IpAddr>,
    /// tcp, udp, sctp, icmp, icmpv6 or a number
    #[arg(long, value_parser = protocol)]
    proto: Option<u8>,
    /// opening, established, half_closed, closing or quarantined
    #[arg(long, value_parser = state)]
    state: Option<SessionState>,
}

impl From<&Filter> for proto::SessionFilter {
    fn from(filter: &Filter) -> Self {
        let address = |address: Option<IpAddr>| address.map(|address| address.to_string()).unwrap_or_default();
        Self {
            endpoint: address(filter.endpoint),
            vip: address(filter.vip),
            remote: address(filter.remote),
            protocol: filter.proto.map(protocol_name).unwrap_or_default(),
            state: filter.state.map(|state| state.name().to_owned()).unwrap_or_default(),
        }
    }
}

/// Does what the command line says; the exit code is the contract's.
pub fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::complain(format_args!("vipgate: {failure}"));
            failure.exit_code()
        }
    }
}

fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Gateway { config } => gateway::run(&config),
        Command::Policyd { config } => policyd::run(&config),
        Command::Policy { action: PolicyAction::Status(ask) } => policy::status(&ask),
        Command::Policy { action: PolicyAction::AcceptEmpty(asked) } => accept_empty::run(&asked),
        Command::Detach { config } => gateway::detach(&config),
        Command::Withdraw => gateway::withdraw(),
        Command::Check { print_schema: Some(Some(of)), .. } => output::json(&schema::document(of)),
        Command::Check { print_schema: Some(None), .. } => output::json(&schema::all()),
        Command::Check { print_crds: true, .. } => output::print(&crd::yaml().map_err(Failure::runtime)?),
        Command::Check { paths, output, .. } => run_check(&paths, output),
        Command::Demo { keep } => demo::run(keep),
        Command::Status(ask) => status::run(&ask),
        Command::Sessions { action: Some(SessionsAction::Flush { ask, filter, all }), .. } => {
            sessions::flush(&ask, &filter, all)
        }
        Command::Sessions { action: None, ask, filter, limit } => sessions::list(&ask, &filter, limit),
        Command::Vips(ask) => show::vips(&ask),
        Command::Endpoints(ask) => show::endpoints(&ask),
        Command::Services(ask) => services::run(&ask),
        Command::Peers(ask) => peers::run(&ask),
        Command::Drain(asked) => drain::drain(&asked),
        Command::Undrain(asked) => drain::undrain(&asked),
        Command::Ports(ask) => ports::run(&ask),
        Command::Drops(asked) => drops::run(&asked),
        Command::Trace(asked) => trace::run(&asked),
        Command::Explain(asked) => explain::run(&asked),
        Command::Capture(asked) => capture::run(&asked),
        Command::Top(asked) => top::run(&asked),
        Command::Completions { shell } => generate::completions(shell),
        Command::Man { folder } => generate::man(&folder),
    }
}

fn run_check(paths: &[PathBuf], format: Format) -> Result<(), Failure> {
    let report = check::run(paths);
    for complaint in &report.complaints {
        output::complain(complaint);
    }
    match format {
        Format::Table => output::print(&report.to_string())?,
        Format::Json => output::json(&report)?,
    }
    match report.errors() {
        0 => Ok(()),
        1 => Err(Failure::usage("1 error")),
        errors => Err(Failure::usage(format_args!("{errors} errors"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_takes_paths_or_prints() {
        let parsed = |line: &str| Cli::try_parse_from(line.split(' ')).map(|cli| cli.command);
        for (line, schema) in [
            ("vipgate check --print-schema", None),
            ("vipgate check --print-schema EgressPolicy", Some(Published::EgressPolicy)),
            ("vipgate check --print-schema GATEWAY.yaml", Some(Published::GatewayYaml)),
            ("vipgate check --print-schema gateway", Some(Published::Gateway)),
        ] {
            let Ok(Command::Check { print_schema, .. }) = parsed(line) else { panic!("{line}") };
            assert_eq!(print_schema, Some(schema), "{line}");
        }
        assert!(matches!(parsed("vipgate check --print-crds"), Ok(Command::Check { print_crds: true, .. })));
        assert!(matches!(
            parsed("vipgate check a b"),
            Ok(Command::Check { print_schema: None, print_crds: false, .. })
        ));
        for line in [
            "vipgate check",
            "vipgate check a --print-schema",
            "vipgate check a --print-crds",
            "vipgate check --print-schema --print-crds",
            "vipgate check --print-schema Service",
        ] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
