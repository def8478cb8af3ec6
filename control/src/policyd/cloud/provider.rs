//! Starts the reconciler of a pool with the provider that the pool names.

use std::sync::Arc;

use tokio::sync::watch;
use vipgate_cloud::aws::{self, Aws};
use vipgate_cloud::azure::{self, Azure};
use vipgate_cloud::gcp::{self, Gcp};
use vipgate_cloud::reconciler::{self, Inputs, PoolState};
use vipgate_cloud::{Associate, CallMeter};
use vipgate_common::Task;
use vipgate_policy::manifest::{self, ProviderSpec};

use crate::config::CloudConfig;

/// Starts a reconciler; `leads` says whether this server may change anything.
///
/// # Errors
/// Why the provider can't be used.
pub(super) fn spawn(
    spec: &ProviderSpec,
    config: &CloudConfig,
    meter: Arc<CallMeter>,
    inputs: watch::Receiver<Inputs>,
    states: watch::Sender<Arc<PoolState>>,
    leads: impl Fn() -> bool + Send + Sync + 'static,
) -> Result<Task, String> {
    if let Some(aws) = &spec.aws {
        let provider = Aws::new(aws_config(spec, aws, config), meter).map_err(|error| error.to_string())?;
        return Ok(Task::spawn(reconciler::run(Arc::new(provider), inputs, states, leads)));
    }
    if let Some(azure) = &spec.azure {
        let provider = Azure::new(&azure_config(spec, azure, config), meter).map_err(|error| error.to_string())?;
        return Ok(Task::spawn(reconciler::run(Arc::new(provider), inputs, states, leads)));
    }
    let gcp = spec.gcp.as_ref().ok_or("names no provider")?;
    let settings =
        gcp::Config { endpoint: config.endpoints.gcp.clone(), ..gcp::Config::new(&gcp.project, &gcp.region) };
    let provider = Gcp::new(&settings, meter).map_err(|error| error.to_string())?;
    Ok(Task::spawn(reconciler::run(Arc::new(provider), inputs, states, leads)))
}

fn associate(spec: &ProviderSpec) -> Associate {
    match spec.associate {
        Some(manifest::Associate::Instance) => Associate::Instance,
        Some(manifest::Associate::Nic) | None => Associate::Nic,
    }
}

fn aws_config(spec: &ProviderSpec, aws: &manifest::AwsSpec, config: &CloudConfig) -> aws::Config {
    aws::Config {
        region: aws.region.clone(),
        associate: associate(spec),
        cluster: config.cluster.clone(),
        endpoint: config.endpoints.aws.clone(),
        credentials: aws::CredentialSource::from_environment(&aws.region, |name| std::env::var(name).ok()),
    }
}

fn azure_config(spec: &ProviderSpec, azure: &manifest::AzureSpec, config: &CloudConfig) -> azure::Config {
    azure::Config {
        location: azure.location.clone(),
        associate: associate(spec),
        endpoint: config.endpoints.azure.clone(),
        ..azure::Config::new(&azure.subscription, &azure.resource_group, &config.cluster)
    }
}
