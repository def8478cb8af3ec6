//! Tries a provider with a real account: attaches a public address to one of two instances, fails over to the other one, hands it
//! back, and gives it up. It needs the permissions that the pages in docs/clouds name, two instances, and an address that nobody
//! uses, or the right to allocate one.
//!
//! ```text
//! cargo run --release -p vipgate-cloud --example cloud-smoke -- aws --region eu-west-1 --tag vipgate=smoke \
//!   --gateway a=aws:///eu-west-1a/i-0abc --gateway b=aws:///eu-west-1a/i-0def --address 203.0.113.7
//! ```

mod flow;

use std::net::IpAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use vipgate_cloud::aws::{self, Aws, CredentialSource};
use vipgate_cloud::azure::{self, Azure};
use vipgate_cloud::gcp::{self, Gcp};
use vipgate_cloud::{Associate, CallMeter, GatewayNic, Provider, Scope};

use self::flow::{Flow, StepReport};

/// Pause between rounds.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Parser)]
#[command(name = "cloud-smoke", about = "Try a cloud provider with a real account")]
struct Command {
    #[command(subcommand)]
    provider: ProviderArgs,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct Common {
    /// Tag or label that the address has
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = pair, required = true, global = true)]
    tags: Vec<(String, String)>,
    /// A gateway and its instance, as `spec.providerID` of a Node has it; twice
    #[arg(long = "gateway", value_name = "NAME=PROVIDER-ID", value_parser = pair, required = true, global = true)]
    gateways: Vec<(String, String)>,
    /// The address, which nobody uses; without it, one is allocated, and released in the end
    #[arg(long, global = true)]
    address: Option<IpAddr>,
    /// Name of the cluster in claims
    #[arg(long, default_value = "cloud-smoke", global = true)]
    cluster: String,
    /// Attach to the primary private address of the NIC
    #[arg(long, global = true)]
    instance: bool,
}

#[derive(Debug, Subcommand)]
enum ProviderArgs {
    /// Elastic IP addresses
    Aws {
        #[arg(long)]
        region: String,
    },
    /// Public IP addresses of Azure
    Azure {
        #[arg(long)]
        subscription: String,
        #[arg(long)]
        resource_group: String,
    },
    /// Static external addresses of Google Cloud
    Gcp {
        #[arg(long)]
        project: String,
        #[arg(long)]
        region: String,
    },
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("is not KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Command::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cloud-smoke: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(Command { provider, common }: Command) -> Result<(), String> {
    let associate = if common.instance { Associate::Instance } else { Associate::Nic };
    let (meter, cluster) = (Arc::<CallMeter>::default(), common.cluster.clone());
    match provider {
        ProviderArgs::Aws { region } => {
            let credentials = CredentialSource::from_environment(&region, |name| std::env::var(name).ok());
            let config = aws::Config { region, associate, cluster, endpoint: None, credentials };
            let provider = Aws::new(config, meter.clone()).map_err(|error| error.to_string())?;
            try_provider(provider, meter, common).await
        }
        ProviderArgs::Azure { subscription, resource_group } => {
            let config = azure::Config { associate, ..azure::Config::new(&subscription, &resource_group, &cluster) };
            let provider = Azure::new(&config, meter.clone()).map_err(|error| error.to_string())?;
            try_provider(provider, meter, common).await
        }
        ProviderArgs::Gcp { project, region } => {
            let provider = Gcp::new(&gcp::Config::new(&project, &region), meter.clone());
            try_provider(provider.map_err(|error| error.to_string())?, meter, common).await
        }
    }
}

async fn try_provider<P: Provider>(provider: P, meter: Arc<CallMeter>, common: Common) -> Result<(), String> {
    let gateways = common.gateways.into_iter();
    let gateways = gateways.map(|(gateway, instance)| GatewayNic { gateway, instance, nic: None }).collect();
    let scope = Scope { tags: common.tags.into_iter().collect(), gateways, ..Scope::default() };
    let flow = Flow { provider, meter, scope, cluster: common.cluster, pause: PAUSE };
    flow.run(common.address, print).await
}

fn print(step: &StepReport) {
    println!("{:<10} {:>7.1} s", step.name, step.time.as_secs_f64());
    for change in &step.changes {
        println!("  {change}");
    }
    for ((operation, code), count) in &step.requests {
        println!("  {count:>3} {operation} {code}");
    }
}
