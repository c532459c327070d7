-- overlap: what each rule of decontamination found, by benchmark
with final as (
    select benchmark, rule, drops, problems, benchmark_problems, benchmark_size, share, flagged
    from contamination_counts
    where source = 'all'
    order by benchmark, not drops, rule
)

select * from final
