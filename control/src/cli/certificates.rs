//! `vipgate certificates`: makes and renews certificates, in Secrets of the Kubernetes API.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;

use super::show::block_on;
use crate::certificates::{DnsName, GatewayNames, Gateways, Location, NamePattern, Specification};
use crate::command_error::CommandError;
use crate::output;

/// The example in its help.
pub(super) const EXAMPLE: &str =
    "Example:\n  vipgate certificates --ca vipgate-ca --gateways 'vipgate-gateway-{name}-tls' --gateway node-1,node-2";

/// Arguments of `vipgate certificates`.
#[derive(Clone, Debug, Args)]
pub(super) struct Certificates {
    /// Namespace of the Secrets; default: that of the pod, or of the kubeconfig's context
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Secret of the CA: `tls.crt` and `tls.key`, valid for ten years, renewed with the same key
    #[arg(long, value_name = "SECRET")]
    ca: String,
    /// Secret of the policy server: `ca.crt`, `tls.crt` and `tls.key`
    #[arg(long, value_name = "SECRET", requires = "server_names")]
    server: Option<String>,
    /// DNS names of the policy server
    #[arg(long = "server-name", value_name = "NAMES", value_delimiter = ',', requires = "server")]
    server_names: Vec<DnsName>,
    /// Secrets of the gateways, one each, with the gateway's name at `{name}`: `ca.crt`, `tls.crt` and `tls.key`
    #[arg(long, value_name = "SECRETS")]
    gateways: Option<NamePattern>,
    /// Names of the gateways, which are their nodes'. May be empty
    #[arg(long = "gateway", value_name = "NAMES", requires = "gateways")]
    gateway_names: Vec<GatewayNames>,
    /// DaemonSets that own the gateways' Secrets in place of the ConfigMap, with the gateway's name at `{name}`
    #[arg(long, value_name = "DAEMONSETS", requires = "gateways")]
    gateway_owners: Option<NamePattern>,
    /// Secret of the agents of nodes: `ca.crt`
    #[arg(long, value_name = "SECRET")]
    nodes: Option<String>,
    /// Secret of the policy servers for the tunnels of nodes (`node_agents.tunnel_secret`): `secret`, random, made once
    #[arg(long, value_name = "SECRET")]
    tunnels: Option<String>,
    /// How many days certificates are valid
    #[arg(long, value_name = "DAYS", default_value_t = 90, value_parser = clap::value_parser!(u16).range(1..=365))]
    days: u16,
    /// How many days before their end they are renewed
    #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = clap::value_parser!(u16).range(0..=365))]
    renew_before: u16,
    /// ConfigMap that owns the Secrets: the cluster deletes them with it
    #[arg(long, value_name = "CONFIGMAP")]
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
    let mut names: Vec<DnsName> = args.gateway_names.iter().flat_map(|names| names.0.clone()).collect();
    names.sort_unstable();
    names.dedup();
    let owners = args.gateway_owners.clone();
    let specification = Specification {
        ca: args.ca.clone(),
        server: args.server.clone().map(|secret| (secret, args.server_names.clone())),
        gateways: args.gateways.clone().map(|secrets| Gateways { secrets, owners, names }),
        nodes: args.nodes.clone(),
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
    fn an_empty_list_of_gateways_is_one() {
        // As a pod has it, whose variable is empty.
        let parsed = parse("vipgate certificates --ca a --gateways b-{name} --gateway=").unwrap();
        assert_eq!(parsed.gateways.unwrap().names, []);
        let parsed = parse("vipgate certificates --ca a --gateways b-{name} --gateway=n-2,n-1 --gateway=n-1").unwrap();
        let names: Vec<String> = parsed.gateways.unwrap().names.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["n-1", "n-2"]);
    }

    #[test]
    fn what_cannot_be_meant_is_rejected() {
        for (line, part) in [
            ("--ca a --server b", "--server-name"),
            ("--ca a --server-name b", "--server"),
            ("--ca a --gateway b", "--gateways"),
            ("--ca a --gateways vipgate-gateway-tls --gateway b", "such as `vipgate-gateway-tls-{name}`"),
            ("--ca a --gateways {name} --gateway-owners b", "must contain `{name}`"),
            ("--ca a --gateways {name} --gateway node_1", "no DNS name"),
            ("--ca a --renew-before 366", "366"),
            ("--ca a --gateways {name} --gateway a", "different"),
            ("--ca a --nodes b --tunnels b", "different"),
        ] {
            let error = parse(&format!("vipgate certificates {line}")).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
