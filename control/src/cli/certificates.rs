//! `vipgate certificates`: makes and renews certificates, in Secrets of the Kubernetes API.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;

use super::show::block_on;
use crate::certificates::{DnsName, Location, Specification};
use crate::command_error::CommandError;
use crate::output;

/// The example in its help.
pub(super) const EXAMPLE: &str =
    "Example:\n  vipgate certificates --server policyd-tls --server-name policyd.vipgate.svc --clients clients-tls";

/// Arguments of `vipgate certificates`.
#[derive(Clone, Debug, Args)]
pub(super) struct Certificates {
    /// Namespace of the Secrets; default: that of the pod, or of the kubeconfig's context
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Secret of the policy server: `ca.crt`, `tls.crt` and `tls.key`, whose key stays the same
    #[arg(long, value_name = "SECRET")]
    server: String,
    /// DNS names of the policy server
    #[arg(long = "server-name", value_name = "NAMES", value_delimiter = ',', required = true)]
    server_names: Vec<DnsName>,
    /// Secret of gateways and of the agents of nodes: `ca.crt`
    #[arg(long, value_name = "SECRET")]
    clients: String,
    /// Secret of the policy servers for the tunnels of nodes (`node_agents.tunnel_secret`): `secret`, random, made once
    #[arg(long, value_name = "SECRET")]
    tunnels: Option<String>,
    /// How many days the certificate is valid
    #[arg(long, value_name = "DAYS", default_value_t = 90, value_parser = clap::value_parser!(u16).range(1..=365))]
    days: u16,
    /// How many days before its end it is renewed
    #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = clap::value_parser!(u16).range(0..=365))]
    renew_before: u16,
    /// ServiceAccount that owns the Secrets: the cluster deletes them with it
    #[arg(long, value_name = "SERVICEACCOUNT")]
    owner: Option<String>,
    /// kubeconfig with the cluster's address and credentials; default: the service account of the pod
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

pub(super) fn run(args: &Certificates) -> Result<(), CommandError> {
    let specification = specification(args)?;
    let location = Location { namespace: args.namespace.clone(), kubeconfig: args.kubeconfig.clone() };
    block_on(async {
        // A log of it that ends early is no reason to end early.
        let mut report = |line: &str| drop(output::print(&format!("{line}\n")));
        let done = crate::certificates::run(&specification, &location, SystemTime::now(), &mut report).await;
        done.map_err(CommandError::runtime)
    })
}

fn specification(args: &Certificates) -> Result<Specification, CommandError> {
    let days = |days: u16| Duration::from_hours(24 * u64::from(days));
    let specification = Specification {
        server: args.server.clone(),
        server_names: args.server_names.clone(),
        clients: args.clients.clone(),
        tunnels: args.tunnels.clone(),
        validity: days(args.days),
        renew_before: days(args.renew_before),
        owner: args.owner.clone(),
    };
    match specification.ambiguous_secret() {
        Some(name) => Err(CommandError::usage(format!("{name}: the Secrets must be different ones"))),
        None => Ok(specification),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    fn parse(line: &str) -> Result<Specification, String> {
        let words = line.split(' ').chain(["--days", "90"]);
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        let Command::Certificates(args) = cli.command else { panic!("another command") };
        specification(&args).map_err(|error| error.to_string())
    }

    #[test]
    fn names_are_separated_by_commas() {
        let line = "vipgate certificates --server a --server-name n-1,n-2 --server-name n-3 --clients b";
        let names = ["n-1", "n-2", "n-3"].map(|name| name.parse::<DnsName>().unwrap());
        assert_eq!(parse(line).unwrap().server_names, names);
    }

    #[test]
    fn what_cannot_be_meant_is_rejected() {
        for (line, part) in [
            ("--server a --clients b", "--server-name"),
            ("--server-name a --clients b", "--server"),
            ("--server a --server-name a", "--clients"),
            ("--server a --server-name node_1 --clients b", "no DNS name"),
            ("--server a --server-name n --clients b --renew-before 366", "366"),
            ("--server a --server-name n --clients a", "different"),
            ("--server a --server-name n --clients b --tunnels a", "different"),
            ("--server a --server-name n --clients b --tunnels b", "different"),
        ] {
            let error = parse(&format!("vipgate certificates {line}")).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
