"""What is measured and what is asked: Profile, Workload, Layout, Cluster, and how they are stored."""
